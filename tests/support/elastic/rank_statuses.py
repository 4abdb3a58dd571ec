"""Statuses that a rank sends to the coordinator.

For the tests of the coordinator.
"""

from __future__ import annotations

import msgspec

from baton_protocol.topology import RankPhase, Status, TopologyMember
from support.elastic.coordinator_process import HOST


def status(**fields: object) -> Status:
    member = TopologyMember("a", "a#0", HOST, 1, 2, 3)
    return msgspec.structs.replace(Status(member, RankPhase.STANDBY, 4, 2), **fields)
