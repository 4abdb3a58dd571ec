"""Preparation, commit and end of generations: failures, and waits that end."""

from __future__ import annotations

import os
import threading
import time
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from baton_engine.distributed.group import Group, LoneGroup
from baton_engine.distributed.group_errors import GroupBrokenError
from baton_engine.models.errors import ModelInvalid
from baton_engine.worker.experts import generations as generations_module
from baton_engine.worker.experts.expert_weights import Expert, ExpertKey, ExpertStore
from baton_engine.worker.experts.preparation import Preparation, PreparationState
from baton_protocol.topology import ExpertLoads, Generation
from support.engine.model_cases import Meeting, ThreadGroup
from support.engine.ranks.expert_ranks import (
    ThreadNetwork,
    ThreadRank,
    commit_everywhere,
    generation,
    place_experts,
    prepare_everywhere,
    run_expert_parallel,
)
from support.engine.ranks.generation_cases import (
    NUM_EXPERTS,
    NUM_LAYERS,
    SEQUENCES,
    TOLERANCE,
    compute_logits,
    generation_of,
)
from support.waiting import eventually

pytestmark = pytest.mark.usefixtures("one_thread")

WAIT_S = 30.0


def wait_for(rank: ThreadRank, state: PreparationState) -> Preparation:
    def reached() -> Preparation | None:
        found = rank.generations.preparation()
        return found if found.state is state else None

    return eventually(reached, timeout_s=WAIT_S, what=f"{rank.name} is {state}")


def test_a_preparation_that_fails_has_a_reason_and_cannot_be_committed(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = ThreadNetwork()
    rank = ThreadRank("r0", checkpoint, network)
    network.unreachable = {"experts-0"}
    rank.generations.prepare(generation_of(1, [rank]))
    assert wait_for(rank, PreparationState.FAILED) == Preparation(
        "nonce-1", PreparationState.FAILED, "TimeoutError: group experts-0 is unreachable"
    )
    with pytest.raises(ValueError, match="generation nonce-1 cannot be committed"):
        rank.generations.commit("nonce-1")
    network.unreachable = set()

    def fail(self: ExpertStore, key: ExpertKey) -> Expert:
        raise ModelInvalid("model.safetensors is gone")

    with monkeypatch.context() as patch:
        patch.setattr(ExpertStore, "read", fail)
        rank.generations.prepare(generation_of(2, [rank]))
        assert (
            wait_for(rank, PreparationState.FAILED).reason
            == "ModelInvalid: model.safetensors is gone"
        )
    for number, placement, reason in (
        (
            3,
            place_experts(1, NUM_EXPERTS, 1),
            "the placement has 1 sparse layers, but the model has 2",
        ),
        (
            4,
            place_experts(NUM_LAYERS, NUM_EXPERTS - 1, 1),
            "placement of sparse layer 0 is not for these ranks",
        ),
        (
            5,
            place_experts(NUM_LAYERS, NUM_EXPERTS, 2),
            "placement of sparse layer 0 is not for these ranks",
        ),
    ):
        rank.generations.prepare(generation(number, ["r0"], placement))
        assert reason in wait_for(rank, PreparationState.FAILED).reason
    with pytest.raises(ValueError, match="r0 is not a member"):
        rank.generations.prepare(generation(6, ["r1"], place_experts(NUM_LAYERS, NUM_EXPERTS, 1)))
    commit_everywhere([rank], generation_of(7, [rank]))


def test_a_preparation_with_other_weights_fails_and_names_the_ranks(checkpoint: Path) -> None:
    network = ThreadNetwork()
    ranks = [
        ThreadRank(f"r{n}", checkpoint, network, compatibility_hash="other" if n == 1 else "")
        for n in range(3)
    ]
    for rank in ranks:
        rank.generations.prepare(generation_of(1, ranks))
    reasons = [wait_for(rank, PreparationState.FAILED).reason for rank in ranks]
    why = "another checkpoint, dtype or quantization than this rank's"
    named = [f"ValueError: {others}: {why}" for others in ("r1", "r0, r2", "r1")]
    # The first rank to see the mismatch aborts the group, so slower ranks may report that.
    assert any(reason in named for reason in reasons)
    assert all(
        reason == name or "GroupBroken" in reason
        for reason, name in zip(reasons, named, strict=True)
    ), reasons


def test_drop_does_not_wait_for_a_join_and_a_group_joined_later_is_left(checkpoint: Path) -> None:
    """The preparation waits for a member that never joins. Only its own nonce drops it."""
    network = ThreadNetwork()
    ranks = [ThreadRank(f"r{number}", checkpoint, network) for number in range(2)]
    joined, may_join = threading.Event(), threading.Event()
    closed: list[str] = []

    class WatchedGroup(ThreadGroup):
        def close(self) -> None:
            closed.append("closed")

    def join_late(
        name: str, of: Generation, rank: int, device: torch.device, timeout_s: float
    ) -> Group:
        joined.set()
        assert may_join.wait(WAIT_S)
        return WatchedGroup(Meeting(of.size), rank)

    ranks[0].join = join_late
    ranks[0].generations.prepare(generation_of(1, ranks))
    assert joined.wait(WAIT_S)
    ranks[0].generations.drop("another one")
    assert ranks[0].generations.preparation().state is PreparationState.PREPARING
    ranks[0].generations.drop("nonce-1")
    assert ranks[0].generations.preparation() == Preparation()
    may_join.set()
    eventually(lambda: closed, timeout_s=WAIT_S, what="the group joined after the drop is left")
    ranks[0].join = network.join
    commit_everywhere(ranks, generation_of(2, ranks))


@pytest.mark.parametrize("leaves", [False, True])
def test_the_end_of_a_generation_frees_experts_at_once_and_its_group_after_a_grace_period(
    leaves: bool, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slower member may still run its last step, which an early close would break."""
    closed, grace_periods, over = threading.Event(), [], threading.Event()

    class WatchedGroup(LoneGroup):
        def close(self) -> None:
            closed.set()

    def wait(seconds: float) -> None:
        grace_periods.append(seconds)
        assert over.wait(WAIT_S)

    monkeypatch.setattr(
        generations_module, "time", SimpleNamespace(monotonic=time.monotonic, sleep=wait)
    )
    rank = ThreadRank("r0", checkpoint, ThreadNetwork())
    rank.join = lambda *_: WatchedGroup()
    commit_everywhere([rank], generation_of(1, [rank]))
    held = weakref.ref(rank.model.sparse_layers[0][1].shard)
    if leaves:
        rank.generations.leave()
    else:
        commit_everywhere([rank], generation_of(2, [rank]))
    eventually(
        lambda: grace_periods == [generations_module.RETIREMENT_GRACE_S],
        timeout_s=WAIT_S,
        what="the grace period begins",
    )
    eventually(lambda: held() is None, timeout_s=WAIT_S, what="the experts are freed")
    assert not closed.is_set()
    over.set()
    assert closed.wait(WAIT_S)


def test_a_preparation_replaces_the_previous_one_unless_it_is_the_same(
    checkpoint: Path, expected: Tensor
) -> None:
    network = ThreadNetwork()
    ranks = [ThreadRank(f"r{number}", checkpoint, network) for number in range(2)]
    prepare_everywhere(ranks, generation_of(1, ranks))
    # A repeated prepare() of the same generation changes nothing.
    ranks[0].generations.prepare(generation_of(1, ranks))
    assert ranks[0].generations.preparation().state is PreparationState.PREPARED
    prepare_everywhere(
        ranks,
        generation(1, ["r0", "r1"], place_experts(NUM_LAYERS, NUM_EXPERTS, 2, 2), "second-attempt"),
    )
    with pytest.raises(ValueError, match="nonce-1 cannot be committed"):
        ranks[0].generations.commit("nonce-1")
    for rank in ranks:
        rank.generations.commit("second-attempt")
    torch.testing.assert_close(compute_logits(ranks), expected, atol=TOLERANCE, rtol=0)


def test_leave_frees_the_experts_and_drops_the_preparation(checkpoint: Path) -> None:
    ranks = [ThreadRank("r0", checkpoint, ThreadNetwork())]
    commit_everywhere(ranks, generation_of(1, ranks))
    prepare_everywhere(ranks, generation_of(2, ranks))
    ranks[0].generations.leave()
    assert ranks[0].generations.preparation() == Preparation()
    assert ranks[0].generations.loads() == ExpertLoads(())
    assert all(layer.shard is None for _, layer in ranks[0].model.sparse_layers)
    ranks[0].generations.leave()


def test_a_rank_that_fails_after_it_joined_fails_the_others_at_their_first_exchange(
    checkpoint: Path,
) -> None:
    network = ThreadNetwork()
    ranks = [ThreadRank(f"r{number}", checkpoint, network) for number in range(2)]
    ranks[1].store.__dict__["read"] = lambda key: (_ for _ in ()).throw(OSError("disk"))
    for rank in ranks:
        rank.generations.prepare(generation_of(1, ranks))
    assert wait_for(ranks[1], PreparationState.FAILED).reason == "OSError: disk"
    wait_for(ranks[0], PreparationState.PREPARED)
    ranks[0].generations.commit("nonce-1")
    with pytest.raises(GroupBrokenError):
        run_expert_parallel(ranks[0].model, SEQUENCES, 7, [(14, 0)])


def test_threads_that_prepare_have_a_low_priority(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    niceness: list[int] = []
    read = ExpertStore.read

    def record_niceness(self: ExpertStore, key: ExpertKey) -> Expert:
        niceness.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return read(self, key)

    monkeypatch.setattr(ExpertStore, "read", record_niceness)
    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    ranks = [ThreadRank("r0", checkpoint, ThreadNetwork())]
    commit_everywhere(ranks, generation_of(1, ranks))
    assert set(niceness) == {max(before, generations_module.NICENESS)}
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before
