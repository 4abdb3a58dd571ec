"""The members that receive POST /drain."""

from __future__ import annotations

from typing import Any

from baton_operator.names import Key
from baton_operator.observe.freshness import Freshness
from baton_operator.observe.observation import Observation, member
from baton_operator.reconcile.drain import drain_members
from support.operator.services import pod


class FakeDrainer:
    """Replies that each engine has two unfinished requests."""

    def __init__(self) -> None:
        self.drained: list[str] = []

    async def drain(self, host: str, key: None) -> int:
        self.drained.append(host)
        return 2


async def test_only_marked_members_that_may_hold_requests_are_drained() -> None:
    pods = {
        "marked": pod("demo-decode-0", draining=True),
        "not marked": pod("demo-decode-1"),
        "not started": pod("demo-decode-2", draining=True, state={"waiting": {}}),
        "deleted": pod("demo-decode-3", draining=True),
    }
    pods["deleted"]["metadata"]["deletionTimestamp"] = "2026-01-02T03:04:05Z"
    for name, each in pods.items():
        each["status"]["podIP"] = name
    observed = Observation(
        key=Key("default", "demo"),
        freshness=Freshness(),
        service={},
        pods=list(pods.values()),
        strays=[],
        objects={},
        kinds=set(),
        key_secret=None,
        service_key=None,
        members={"decode": list(map(member, pods.values())), "prefill": []},
    )
    drainer: Any = FakeDrainer()
    observed = await drain_members(drainer, observed)
    assert drainer.drained == ["marked"]
    assert [each.unfinished for each in observed.members["decode"]] == [2, None, None, None]
