"""The states of a load: who may still write, what is settled, and how many blocks are valid."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from baton_kv_transfer.connector import LoadRequest, LoadResult
from baton_kv_transfer.consumer.load_state import Load, LoadState, RankTransfer, RankTransferState
from baton_kv_transfer.consumer.peer import Peer
from baton_kv_transfer.memory.layout import HeadRange

NUM_BLOCKS = 3
State = RankTransferState


def new_load(missing: tuple[int, ...] = (1, 1, 1)) -> Load:
    request = LoadRequest("t", "h", 1, "P", 0, list(range(NUM_BLOCKS)), [b""] * NUM_BLOCKS)
    return Load(
        request,
        generation=1,
        lead_peer=cast(Peer, SimpleNamespace(name="lead")),
        started=0.0,
        push=True,
        missing=np.array(missing, dtype=np.int32),
    )


def add_transfer(load: Load, state: State, **fields: Any) -> RankTransfer:
    transfer = RankTransfer(
        load,
        cast(Peer, SimpleNamespace(name=state.name)),
        0,
        HeadRange(0, 1),
        0,
        1,
        block_nbytes=8,
        last_block=0.0,
        deadline=9.0,
        peer_slots=np.full(NUM_BLOCKS, -1),
        checksums=[0] * NUM_BLOCKS,
        reread=np.zeros(NUM_BLOCKS, dtype=np.bool_),
        state=state,
        **fields,
    )
    load.rank_transfers.append(transfer)
    return transfer


@pytest.mark.parametrize(
    ("state", "fields", "may_write"),
    [
        (State.OPEN, {}, False),
        (State.PUSHING, {}, True),
        (State.PUSHING, {"num_verified": 2, "is_last_received": True}, True),
        (State.PUSHING, {"num_verified": 3}, True),
        (State.PUSHING, {"num_verified": 3, "is_last_received": True}, False),
        (State.PUSHING, {"num_verified": 3, "num_written": 3}, False),
        (State.QUARANTINE, {"num_verified": 3, "is_last_received": True}, True),
        (State.ENDED, {}, False),
    ],
)
def test_a_producer_may_write_until_all_its_writes_are_known_to_be_over(
    state: State, fields: dict[str, Any], may_write: bool
) -> None:
    transfer = add_transfer(new_load(), state, **fields)
    assert transfer.may_write == may_write
    transfer.end_writes()
    assert not transfer.may_write


@pytest.mark.parametrize(
    ("state", "after", "is_settled"),
    [
        (State.PUSHING, State.OPEN, False),
        (State.QUARANTINE, State.ENDED, True),
        (State.HANDSHAKE, State.HANDSHAKE, True),
    ],
)
def test_only_a_transfer_in_quarantine_ends_with_its_writes(
    state: State, after: State, is_settled: bool
) -> None:
    transfer = add_transfer(new_load(), state)
    transfer.end_writes()
    assert (transfer.state, transfer.is_settled) == (after, is_settled)


def test_a_load_needs_its_lead_peer_and_then_the_peers_that_are_not_released() -> None:
    load = new_load()
    assert load.peers == [load.lead_peer]
    load.state = LoadState.SETTLING
    transfers = [add_transfer(load, state) for state in (State.OPEN, State.QUARANTINE, State.ENDED)]
    assert load.peers == [transfers[0].peer]


@pytest.mark.parametrize(("missing", "num_valid"), [((0, 0, 0), 3), ((0, 1, 0), 1), ((2, 0, 0), 0)])
def test_only_blocks_before_the_first_missing_one_are_valid(
    missing: tuple[int, ...], num_valid: int
) -> None:
    load = new_load(missing)
    assert load.result() == LoadResult(0)  # no transfer has begun
    add_transfer(load, State.ENDED)
    load.error = "lost"
    assert load.result() == LoadResult(num_valid, "lost")
