"""OutputAggregator: a transfer ends when it has ended on every worker."""

from __future__ import annotations

from baton_engine.executor.multiproc.connector_outputs import OutputAggregator
from baton_kv_transfer.connector import ConnectorOutput, LoadResult


def sent(*transfer_ids: str) -> ConnectorOutput:
    return ConnectorOutput(finished_sending=set(transfer_ids))


def loaded(num_valid_blocks: int, error: str = "") -> ConnectorOutput:
    return ConnectorOutput(load_results={"t": LoadResult(num_valid_blocks, error)})


def test_a_send_ends_when_it_has_ended_on_all_workers() -> None:
    outputs = OutputAggregator(2)
    assert not outputs.add(0, sent("a", "b"))
    assert not outputs.take()
    assert outputs.add(1, sent("b", "c"))
    assert outputs.take() == sent("b")
    assert not outputs.take()
    assert outputs.add(1, sent("a"))
    assert outputs.add(0, sent("c"))
    assert outputs.take() == sent("a", "c")


def test_a_repeated_report_of_one_worker_does_not_end_a_send() -> None:
    outputs = OutputAggregator(2)
    assert not outputs.add(1, sent("a"))
    assert not outputs.add(1, sent("a"))
    assert not outputs.take()


def test_a_load_has_the_fewest_valid_blocks_and_the_error_of_the_lowest_rank() -> None:
    outputs = OutputAggregator(3)
    assert not outputs.add(2, loaded(4))
    assert not outputs.add(0, loaded(1, "first"))
    assert outputs.add(1, loaded(0, "second"))
    assert outputs.take().load_results == {"t": LoadResult(0, "first")}


def test_a_transfer_id_can_be_used_again_after_its_transfer_ended() -> None:
    outputs = OutputAggregator(2)
    for blocks in (3, 5):
        assert not outputs.add(0, loaded(blocks))
        assert outputs.add(1, loaded(blocks + 1))
        assert outputs.take().load_results == {"t": LoadResult(blocks)}


def test_the_output_of_a_single_worker_is_passed_on() -> None:
    outputs = OutputAggregator(1)
    assert outputs.add(0, loaded(2))
    assert outputs.take() == loaded(2)
