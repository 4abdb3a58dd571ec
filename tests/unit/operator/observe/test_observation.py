"""Members observed from pods."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

import pytest

from baton_kube.client import Object
from baton_operator.builders.resolved_service import controlled_by
from baton_operator.names import ANNOTATION_DRAIN_STARTED
from baton_operator.observe.observation import member, read_together
from support.operator.services import pod


def running(**container: Any) -> Object:
    observed = pod("demo-decode-12", ready=True)
    observed["status"]["podIP"] = "127.0.0.1"
    observed["status"]["containerStatuses"][0] |= container
    return observed


def test_a_member_is_read_from_its_pod() -> None:
    observed = running(started=True)
    seen = member(observed)
    assert (seen.name, seen.ordinal, seen.revision) == ("demo-decode-12", 12, "new")
    assert seen.ready
    assert seen.started
    assert not seen.draining


def test_drain_marks_are_read_and_invalid_ones_are_ignored() -> None:
    observed = pod(draining=True)
    observed["metadata"]["annotations"][ANNOTATION_DRAIN_STARTED] = "2026-01-02T03:04:05+00:00"
    assert member(observed).drain_started == datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    observed["metadata"]["annotations"][ANNOTATION_DRAIN_STARTED] = "yesterday"
    assert member(observed).draining
    assert member(observed).drain_started is None


def test_a_terminating_pod_is_not_ready() -> None:
    observed = running(started=True)
    observed["metadata"]["deletionTimestamp"] = "2026-01-02T03:04:05Z"
    assert not member(observed).ready
    assert member(observed).deletion == datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


@pytest.mark.parametrize(
    ("container", "started"),
    [
        ({"started": True}, True),
        ({"started": False}, False),
        ({}, True),  # not reported by the kubelet: a running engine may hold requests
        ({"state": {"waiting": {"reason": "CrashLoopBackOff"}}}, False),
        ({"name": "sidecar", "started": True}, False),
    ],
)
def test_only_a_started_engine_can_hold_requests(container: Object, started: bool) -> None:
    assert member(running(**container)).started is started


def test_only_the_controller_reference_makes_a_member() -> None:
    owned = {"metadata": {"ownerReferences": [{"uid": "u", "controller": True}]}}
    assert controlled_by(owned, "u")
    assert not controlled_by(owned, "another")
    assert not controlled_by({"metadata": {"ownerReferences": [{"uid": "u"}]}}, "u")
    assert not controlled_by({"metadata": {}}, "u")


async def test_if_a_read_fails_the_others_end_before_its_error_is_raised() -> None:
    ended: list[str] = []

    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("the other read")

    async def fail() -> None:
        raise OSError("no route")

    with pytest.raises(OSError, match="no route"):
        await read_together(wait(), fail())
    assert ended == ["the other read"]
