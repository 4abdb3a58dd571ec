"""Validation of the statuses that ranks send to the coordinator."""

from __future__ import annotations

import msgspec
import pytest

from baton_engine.elastic.coordinator.topology_validation import (
    MAX_EXPERTS,
    MAX_FAILURE,
    MAX_MEMBERS,
    MAX_SLOTS,
    check_status,
    truncate_failure,
)
from baton_protocol.topology import Generation, Status, TopologyMember
from support.elastic.coordinator_process import HOST
from support.elastic.rank_statuses import status

GENERATION = Generation(1, "1.x", (status().member,), (((0, 1, 2, 3),),) * 2, HOST, 3)


@pytest.mark.parametrize(
    "wrong",
    [
        status(member=TopologyMember("a\nb", "a#0", HOST, 1, 2, 3)),
        status(member=TopologyMember("a" * 64, "a#0", HOST, 1, 2, 3)),
        status(member=TopologyMember("a", "a\x1b", HOST, 1, 2, 3)),
        status(member=TopologyMember("a", "a" * 300, HOST, 1, 2, 3)),
        status(member=TopologyMember("a", "a#0", "host name", 1, 2, 3)),
        status(member=TopologyMember("a", "a#0", HOST, 1, 2, 2**16)),
        status(member=TopologyMember("a", "a#0", HOST, 1, -2, 3)),
        status(suspects=("x",) * (MAX_MEMBERS + 1)),
        status(suspects=("a b",)),
        status(prepared="1.x\n"),
        status(commit_seen="1." + "x" * 300),
        status(failed="\x1b"),
        status(num_redundant_experts=-1),
        status(num_redundant_experts=2**40),
        status(num_experts=MAX_EXPERTS, num_sparse_layers=MAX_SLOTS // MAX_EXPERTS + 1),
        status(
            generation=msgspec.structs.replace(
                GENERATION, placement=(((0,) * (MAX_SLOTS // 2 + 1),),) * 2
            )
        ),
        status(generation=msgspec.structs.replace(GENERATION, operation_id="o\n")),
        status(generation=msgspec.structs.replace(GENERATION, nonce="1.x\n")),
        status(generation=msgspec.structs.replace(GENERATION, store_host="")),
        status(
            committed=msgspec.structs.replace(
                GENERATION, members=(TopologyMember("B", "b", HOST, 1, 2, 3),)
            )
        ),
    ],
)
def test_a_status_with_invalid_names_or_numbers_is_refused(wrong: Status) -> None:
    with pytest.raises(
        ValueError, match=r"generation|a port is not|address is invalid|a DNS label|suspect|experts"
    ) as refused:
        check_status(wrong)
    assert str(refused.value).isprintable()


def test_a_status_with_a_long_reason_is_truncated() -> None:
    check_status(status(generation=GENERATION, committed=GENERATION))
    long = status(failure="x" * 10**6)
    check_status(long)
    assert len(truncate_failure(long).failure) < 2 * MAX_FAILURE
    assert truncate_failure(status(failure="why")) == status(failure="why")
