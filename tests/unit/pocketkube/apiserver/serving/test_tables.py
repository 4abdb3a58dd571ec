"""The cells of the tables that `kubectl get` prints."""

from __future__ import annotations

import datetime
from typing import Any

import pytest

from pocketkube.apiserver.resources import Resource
from pocketkube.apiserver.serving.tables import TablePrinter, age, json_path

POD: dict[str, Any] = {
    "metadata": {"labels": {"baton.dev/role": "decode"}},
    "status": {
        "conditions": [
            {"type": "Scheduled", "status": "True"},
            {"type": "Ready", "status": "False"},
        ],
        "podIPs": [{"ip": "10.0.0.1"}, {"ip": "fd00::1"}],
        "phase": "Running",
    },
}


@pytest.mark.parametrize(
    ("expression", "found"),
    [
        (".status.phase", "Running"),
        ("{.status.phase}", "Running"),
        (".status.podIPs[0].ip", "10.0.0.1"),
        (".status.podIPs[-1].ip", "fd00::1"),
        (".status.podIPs[*].ip", "10.0.0.1,fd00::1"),
        (".metadata.labels['baton.dev/role']", "decode"),
        (".metadata.labels.baton\\.dev/role", "decode"),
        ('.status.conditions[?(@.type=="Ready")].status', "False"),
        # No value is found.
        (".status.reason", None),
        (".status.phase.more", None),
        (".status.podIPs[2].ip", None),
        ('.status.conditions[?(@.type=="Missing")].status', None),
        ('.status.phase[?(@.type=="Ready")]', None),
    ],
)
def test_a_json_path_finds_a_value_or_none(expression: str, found: str | None) -> None:
    assert json_path(POD, expression) == found


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0, "0s"),
        (119, "119s"),
        (120, "2m"),
        (2 * 3600 - 1, "119m"),
        (2 * 3600, "2h"),
        (2 * 86400, "2d"),
        (-30, "0s"),  # the clock of the client was ahead
    ],
)
def test_an_age_has_one_unit(monkeypatch: pytest.MonkeyPatch, seconds: int, shown: str) -> None:
    now = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)

    class Clock(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:
            return now

    monkeypatch.setattr("pocketkube.apiserver.serving.tables.datetime.datetime", Clock)
    assert age((now - datetime.timedelta(seconds=seconds)).isoformat()) == shown


def test_an_object_without_a_timestamp_has_no_age() -> None:
    assert age(None) == "<unknown>"


@pytest.mark.parametrize(
    ("status", "ready", "shown", "restarts"),
    [
        ({}, "0/2", "Unknown", "0"),
        ({"phase": "Pending"}, "0/2", "Pending", "0"),
        ({"phase": "Failed", "reason": "Evicted"}, "0/2", "Evicted", "0"),
        (
            {
                "phase": "Running",
                "containerStatuses": [
                    {"ready": True, "restartCount": 1, "state": {"running": {}}},
                    {
                        "ready": False,
                        "restartCount": 2,
                        "state": {"waiting": {"reason": "CrashLoopBackOff"}},
                    },
                ],
            },
            "1/2",
            "CrashLoopBackOff",
            "3",
        ),
        (
            {"phase": "Failed", "containerStatuses": [{"state": {"terminated": {"exitCode": 3}}}]},
            "0/2",
            "ExitCode:3",
            "0",
        ),
    ],
)
def test_the_row_of_a_pod_shows_the_state_of_its_containers(
    status: dict[str, Any], ready: str, shown: str, restarts: str
) -> None:
    pod = {"metadata": {"name": "p"}, "spec": {"containers": [{}, {}]}, "status": status}
    (row,) = _table("Pod", [pod])["rows"]
    assert row["cells"][:4] == ["p", ready, shown, restarts]


def test_a_pod_that_is_being_deleted_is_terminating() -> None:
    metadata = {"name": "p", "deletionTimestamp": "2026-01-01T00:00:00Z"}
    (row,) = _table("Pod", [{"metadata": metadata, "status": {"phase": "Running"}}])["rows"]
    assert row["cells"][2] == "Terminating"


def test_a_custom_resource_has_the_columns_that_its_definition_declares() -> None:
    columns = [
        {"name": "Ready", "type": "string", "jsonPath": ".status.ready"},
        {"name": "Size", "type": "integer", "jsonPath": ".spec.size", "priority": 1},
    ]
    table = _table(
        "Thing", [{"metadata": {"name": "t"}, "spec": {"size": 2}, "status": {"ready": True}}],
        columns, custom=True,
    )  # fmt: skip
    assert [(each["name"], each["priority"]) for each in table["columnDefinitions"]] == [
        ("Name", 0), ("Ready", 0), ("Size", 1),
    ]  # fmt: skip
    assert table["rows"] == [{"cells": ["t", "true", 2]}]


@pytest.mark.parametrize(
    ("include", "contained"),
    [
        ("None", None),
        ("Object", {"metadata": {"name": "p"}, "data": {}}),
        (
            "Metadata",
            {
                "kind": "PartialObjectMetadata",
                "apiVersion": "meta.k8s.io/v1",
                "metadata": {"name": "p"},
            },
        ),
    ],
)
def test_a_row_contains_what_the_client_asked_for(include: str, contained: Any) -> None:
    table = _table("ConfigMap", [{"metadata": {"name": "p"}, "data": {}}], include=include)
    assert table["rows"][0].get("object") == contained


def _table(
    kind: str,
    objects: list[dict[str, Any]],
    columns: list[dict[str, Any]] | None = None,
    *,
    custom: bool = False,
    include: str = "None",
) -> dict[str, Any]:
    resource = Resource("", "v1", kind, f"{kind.lower()}s", custom=custom)
    return TablePrinter(resource, columns or []).table(objects, {}, include)
