"""The data that passes between the two sides of a connector."""

from __future__ import annotations

import pytest

from baton_kv_transfer.connector import (
    BlockSave,
    ConnectorMetadata,
    ConnectorOutput,
    ConnectorStats,
    FailureReason,
    LoadRequest,
    LoadResult,
    LoadWait,
)


@pytest.mark.parametrize(
    "metadata",
    [
        ConnectorMetadata(saves=[BlockSave("t", 0, [], [], 0, True)]),
        ConnectorMetadata(loads=[LoadRequest("t", "h", 1, "P", 0, [], [])]),
        ConnectorMetadata(offers={"t": "C"}),
        ConnectorMetadata(cancels=["t"]),
        ConnectorMetadata(waits={"t": LoadWait("h", 1, "P")}),
    ],
)
def test_metadata_with_any_work_is_sent(metadata: ConnectorMetadata) -> None:
    assert metadata
    assert not ConnectorMetadata()


def test_an_output_with_an_ended_transfer_or_load_is_reported() -> None:
    assert ConnectorOutput(finished_sending={"t"})
    assert ConnectorOutput(load_results={"t": LoadResult(0)})
    assert not ConnectorOutput()


def test_the_statistics_of_workers_are_added_and_the_first_failure_is_kept() -> None:
    one = ConnectorStats(blocks_sent=2, receive_seconds=0.5, bytes_moved={"tcp": 10, "shm": 1})
    other = ConnectorStats(blocks_sent=3, receive_seconds=1.0, bytes_moved={"tcp": 5})
    one.count_failure(FailureReason.CHECKSUM)
    for _ in range(2):
        other.count_failure(FailureReason.CHECKSUM)
    other.count_failure(FailureReason.TIMEOUT)
    other.failure = "the thread ended"
    last = ConnectorStats(failure="later")
    total = ConnectorStats.total([one, other, last])
    assert total == ConnectorStats(
        blocks_sent=5,
        receive_seconds=1.5,
        failures={"checksum": 3, "timeout": 1},
        bytes_moved={"tcp": 15, "shm": 1},
        failure="the thread ended",
    )
    assert one.failures == {"checksum": 1}
