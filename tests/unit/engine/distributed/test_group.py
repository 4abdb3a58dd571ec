"""Groups whose ranks are threads: all_to_all, abort, close, timeouts and concurrent groups."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._C._distributed_c10d import HashStore

from baton_engine.distributed import process_group
from baton_engine.distributed.group import Group
from baton_engine.distributed.group_errors import GroupBrokenError
from baton_engine.distributed.process_group import create_group, generation_store
from baton_engine.distributed.shared_memory_group import BUFFER_NBYTES
from baton_engine.distributed.store.socket_store import connect_store
from support.engine.ranks.group_ranks import (
    CPU,
    KINDS,
    WAIT_S,
    Ranks,
    check_all_to_all,
    random_rows,
)
from support.waiting import eventually

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.int16,
    torch.uint8,
    torch.bool,
]


@pytest.fixture(params=KINDS)
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    ranks = Ranks(request.param, 2)
    yield ranks
    ranks.close()


@pytest.fixture(scope="module", params=[(kind, size) for kind in KINDS for size in (2, 4)], ids=str)
def lasting(request: pytest.FixtureRequest) -> Iterator[tuple[Ranks, list[Group]]]:
    ranks = Ranks(*request.param)
    groups = ranks.join()
    yield ranks, groups
    ranks.each(lambda rank: groups[rank].close())
    ranks.close()


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_all_to_all_sends_every_run_of_rows_to_its_rank(
    lasting: tuple[Ranks, list[Group]], data: st.DataObject
) -> None:
    ranks, groups = lasting
    size = ranks.size
    dtype = data.draw(st.sampled_from(DTYPES))
    tail = data.draw(st.sampled_from([(), (1,), (3,), (2, 5), (0,), (4099,)]))
    most = (
        2 * BUFFER_NBYTES // (torch.Size(tail).numel() * dtype.itemsize or 1)
        if tail == (4099,)
        else 40
    )
    count = st.one_of(st.just(0), st.integers(0, most))
    counts = data.draw(
        st.lists(st.lists(count, min_size=size, max_size=size), min_size=size, max_size=size)
    )
    rows = [random_rows((sum(counts[rank]), *tail), dtype, rank) for rank in range(size)]
    check_all_to_all(ranks, groups, rows, counts)


def test_all_to_all_accepts_rows_that_are_not_contiguous(
    lasting: tuple[Ranks, list[Group]],
) -> None:
    ranks, groups = lasting
    rows = [torch.arange(12.0 * ranks.size).view(3, -1).t() + rank for rank in range(ranks.size)]
    check_all_to_all(ranks, groups, rows, [[4] * ranks.size] * ranks.size)


def test_counts_that_do_not_match_the_rows_are_refused(ranks: Ranks) -> None:
    groups = ranks.join()
    for send, recv in (([1, 2], [1, 1]), ([2], [2]), ([1, 1], [2])):
        with pytest.raises(ValueError, match=r"all_to_all of 2 rows among 2 ranks"):
            groups[0].all_to_all(torch.zeros(2, 3), send, recv)
    assert ranks.each(lambda rank: groups[rank].all_reduce(torch.ones(1)).tolist()) == [
        [2.0],
        [2.0],
    ], "the group must still work"


def test_operations_of_an_aborted_group_fail_at_once(ranks: Ranks) -> None:
    groups = ranks.join()
    groups[0].abort()
    groups[0].abort()
    started = time.monotonic()
    for operation in (
        lambda: groups[0].all_reduce(torch.zeros(1)),
        lambda: groups[0].all_gather(torch.zeros(1)),
        lambda: groups[0].all_to_all(torch.zeros(2), [1, 1], [1, 1]),
        lambda: groups[0].send(torch.zeros(1), 1),
        lambda: groups[0].recv(torch.zeros(1), 1),
    ):
        with pytest.raises(
            GroupBrokenError, match=r"in group test, rank 0 of 2.*the group was aborted"
        ):
            operation()
    with pytest.raises(GroupBrokenError, match="a member is gone"):
        groups[1].all_reduce(torch.zeros(1))  # an abort leaves the group
    assert time.monotonic() - started < 5


def test_abort_ends_a_waiting_operation(ranks: Ranks) -> None:
    groups = ranks.join()
    waiting = ranks.pool.submit(groups[0].all_reduce, torch.zeros(1))
    with pytest.raises(TimeoutError):
        waiting.result(0.2)
    started = time.monotonic()
    groups[0].abort()
    with pytest.raises(
        GroupBrokenError, match=r"all_reduce in group test, rank 0 of 2.*the group was aborted"
    ):
        waiting.result(WAIT_S)
    assert time.monotonic() - started < 5


def test_a_member_that_does_not_respond_is_a_timeout_and_breaks_the_group(ranks: Ranks) -> None:
    groups = ranks.join(timeout_s=0.5)
    with pytest.raises(TimeoutError, match=r"all_to_all in group test, rank 0 of 2.*rank 1"):
        groups[0].all_to_all(torch.zeros(2), [1, 1], [1, 1])
    with pytest.raises(GroupBrokenError, match="an earlier all_to_all timed out"):
        groups[0].all_reduce(torch.zeros(1))
    # Rows sent before the timeout can still arrive. The other member may also find no receiver.
    with contextlib.suppress(GroupBrokenError, TimeoutError):
        groups[1].all_to_all(torch.zeros(2), [1, 1], [1, 1])
    with pytest.raises(GroupBrokenError, match=r"a member is gone|an earlier all_to_all timed out"):
        groups[1].all_reduce(torch.zeros(1))


def test_groups_of_two_attempts_at_one_generation_are_separate(ranks: Ranks) -> None:
    first, second = ranks.join(nonce="a"), ranks.join(nonce="b")
    for factor in (1, 2):
        assert (
            ranks.each(lambda rank, f=factor: first[rank].all_reduce(torch.tensor([f])).item())
            == [2 * factor] * 2
        )
        assert (
            ranks.each(lambda rank, f=factor: second[rank].all_reduce(torch.tensor([5 * f])).item())
            == [10 * factor] * 2
        )
    first[0].abort()
    first[1].close()
    first[0].close()
    first[0].abort()  # must not close connections of other groups
    assert ranks.each(lambda rank: second[rank].all_reduce(torch.tensor([7])).item()) == [14, 14]


def test_joining_without_the_other_members_ends_at_the_join_timeout(
    ranks: Ranks,
) -> None:
    def join(rank: int) -> None:
        store = connect_store(ranks.address, WAIT_S)
        with pytest.raises(
            TimeoutError,
            match=f"generation 1: rank {rank} waited 1 s for the other 1",
        ):
            create_group(
                "test", rank, 2, store, 1, CPU, WAIT_S, nonce="ab"[rank], join_timeout_s=1.0
            )

    started = time.monotonic()
    ranks.each(join)
    assert time.monotonic() - started < WAIT_S / 2


def test_the_death_of_a_member_during_joining_breaks_the_group() -> None:
    ranks = Ranks("shared memory", 2)
    died = mock.Mock(side_effect=ProcessLookupError)
    with (
        mock.patch.object(os, "pidfd_open", died),
        pytest.raises(
            GroupBrokenError,
            match=r"joining group test, rank \d of 2: a member is gone \(rank \d has died\)",
        ),
    ):
        ranks.join()
    ranks.close()


def test_a_run_of_another_length_than_its_receiver_expects_is_refused() -> None:
    ranks = Ranks("shared memory", 2)
    groups = ranks.join()

    def run(rank: int) -> None:
        if rank == 0:
            groups[0].all_to_all(torch.zeros(5, dtype=torch.int16), [2, 3], [2, 4])
            return
        with pytest.raises(
            ValueError,
            match="all_to_all in group test, rank 1 of 2: "
            "rank 0 sends 6 bytes, but recv_counts say 8",
        ):
            groups[1].all_to_all(torch.zeros(5, dtype=torch.int16), [4, 1], [4, 1])

    ranks.each(run)
    for group in groups:
        group.close()
    ranks.close()


def test_generations_have_separate_keys_in_the_store() -> None:
    store = HashStore()
    parts = [
        generation_store(store, 1),
        generation_store(store, 1, "a"),
        generation_store(store, 1, "b"),
    ]
    parts.append(generation_store(store, 2, "a"))
    for i, part in enumerate(parts):
        part.set("key", str(i))
    assert [part.get("key") for part in parts] == [b"0", b"1", b"2", b"3"]
    assert generation_store(store, 2, "a").get("key") == b"3"


def test_operations_have_a_different_timeout_than_joining(ranks: Ranks) -> None:
    def run(rank: int) -> None:
        store = connect_store(ranks.address, WAIT_S)
        group = create_group("test", rank, 2, store, 1, CPU, 0.5, join_timeout_s=WAIT_S)
        if rank == 0:
            started = time.monotonic()
            with pytest.raises(TimeoutError):
                group.recv(torch.zeros(1), 1)
            assert time.monotonic() - started < WAIT_S / 2
            timed_out.set()
        else:
            assert timed_out.wait(WAIT_S)

    timed_out = threading.Event()
    ranks.each(run)


@pytest.mark.parametrize("end", ["close", "abort", "timeout"])
def test_a_closed_group_leaves_no_descriptors_and_threads(ranks: Ranks, end: str) -> None:
    def open_resources() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    gc.collect()  # frees objects that exceptions of other tests hold
    barrier = threading.Barrier(2)
    ranks.each(lambda rank: barrier.wait(WAIT_S))  # starts the threads of the pool
    before = open_resources()
    groups = ranks.join(timeout_s=0.5 if end == "timeout" else WAIT_S)
    assert open_resources() > before
    error: Exception | None = None
    try:
        if end == "abort":
            groups[0].abort()
        if end != "close":
            groups[0].all_reduce(torch.zeros(1))
    except (GroupBrokenError, TimeoutError) as caught:
        error = caught  # the kept error must not hold the group
    assert (error is None) == (end == "close")
    for group in groups:
        group.close()
        group.close()

    def is_released() -> bool:
        assert open_resources() == before
        return True

    eventually(is_released, "the descriptors and threads as before", WAIT_S)


def test_groups_formed_by_many_threads_close_only_their_own_connections() -> None:
    def form(number: int) -> list[Group]:
        ranks = Ranks("gloo", 2)
        joined = ranks.join(f"group-{number}")
        ranks.close()
        return joined

    with (
        ThreadPoolExecutor(4) as pool,
        mock.patch.object(process_group, "over_shared_memory", lambda group, *_: group),
    ):
        groups = list(pool.map(form, range(8), timeout=WAIT_S))
        for i, (first, second) in enumerate(groups):
            first.abort()
            second.close()
            for one, other in groups[i + 1 :]:
                answer = pool.submit(other.all_reduce, torch.ones(1))
                assert one.all_reduce(torch.ones(1)).item() == 2 == answer.result(WAIT_S).item()
            first.close()
