"""OutputAggregator: a transfer has ended when it ended on every worker."""

from __future__ import annotations

from baton_engine.executor.multiproc.connector_outputs import OutputAggregator
from baton_kv_transfer.connector import ConnectorOutput, LoadResult


def sent(*transfer_ids: str) -> ConnectorOutput:
    return ConnectorOutput(finished_sending=set(transfer_ids))


def loaded(num_valid_blocks: int, error: str = "") -> ConnectorOutput:
    return ConnectorOutput(load_results={"t": LoadResult(num_valid_blocks, error)})


def test_blocks_are_free_when_all_workers_let_go_of_them_once() -> None:
    outputs = OutputAggregator(2)
    assert not outputs.add(0, sent("a", "b"))
    assert not outputs.take()
    assert outputs.add(1, sent("b", "c"))
    assert outputs.take() == sent("b")
    assert not outputs.take()
    assert outputs.add(1, sent("a"))
    assert outputs.add(0, sent("c"))
    assert outputs.take() == sent("a", "c")


def test_a_worker_that_says_it_twice_does_not_speak_for_the_other() -> None:
    outputs = OutputAggregator(2)
    assert not outputs.add(1, sent("a"))
    assert not outputs.add(1, sent("a"))
    assert not outputs.take()


def test_a_load_brought_what_every_worker_got_and_the_first_error_says_why_not_more() -> None:
    outputs = OutputAggregator(3)
    assert not outputs.add(2, loaded(4))
    assert not outputs.add(0, loaded(1, "first"))
    assert outputs.add(1, loaded(0, "second"))
    assert outputs.take().load_results == {"t": LoadResult(0, "first")}


def test_an_id_may_be_used_again_once_its_transfer_ended() -> None:
    outputs = OutputAggregator(2)
    for blocks in (3, 5):
        assert not outputs.add(0, loaded(blocks))
        assert outputs.add(1, loaded(blocks + 1))
        assert outputs.take().load_results == {"t": LoadResult(blocks)}


def test_one_worker_speaks_for_itself() -> None:
    outputs = OutputAggregator(1)
    assert outputs.add(0, loaded(2))
    assert outputs.take() == loaded(2)
