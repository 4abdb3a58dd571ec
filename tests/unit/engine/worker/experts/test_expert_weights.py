"""The weights of experts: read from the checkpoint once, sent between ranks, and kept."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from baton_engine.distributed.group import Group
from baton_engine.worker.experts.expert_exchange import wanted_by
from baton_engine.worker.experts.expert_weights import Expert, ExpertForm, ExpertKey, ExpertStore
from baton_protocol.topology import Generation
from support.engine.model_cases import ThreadGroup
from support.engine.ranks.expert_ranks import (
    ThreadNetwork,
    ThreadRank,
    commit_everywhere,
    generation,
)
from support.engine.ranks.generation_cases import (
    NUM_EXPERTS,
    NUM_LAYERS,
    TOLERANCE,
    compute_logits,
    generation_of,
)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[ExpertKey]:
    """The experts that any rank reads from the checkpoint, in order."""
    keys: list[ExpertKey] = []
    read = ExpertStore.read

    def count(self: ExpertStore, key: ExpertKey) -> Expert:
        keys.append(key)
        return read(self, key)

    monkeypatch.setattr(ExpertStore, "read", count)
    return keys


@pytest.mark.parametrize("form", ExpertForm)
def test_experts_are_read_once_and_then_sent_from_rank_to_rank(
    form: ExpertForm, checkpoint: Path, expected: Tensor, reads: list[ExpertKey]
) -> None:
    network = ThreadNetwork()
    ranks = [ThreadRank(f"r{number}", checkpoint, network, form=form) for number in range(3)]
    commit_everywhere(ranks[:2], generation_of(1, ranks[:2]))
    assert len(reads) == NUM_LAYERS * NUM_EXPERTS
    before = compute_logits(ranks[:2])
    if form in (ExpertForm.PLAIN, ExpertForm.PACKED):
        torch.testing.assert_close(before, expected, atol=TOLERANCE, rtol=0)
    reads.clear()
    commit_everywhere(ranks, generation_of(2, ranks))
    torch.testing.assert_close(compute_logits(ranks), before, atol=TOLERANCE, rtol=0)
    # Experts that only the first rank held are read again.
    commit_everywhere(ranks[1:], generation_of(3, ranks[1:]))
    held = [wanted_by(generation_of(2, ranks).placement, rank) for rank in range(3)]
    assert sorted(reads) == sorted(held[0] - held[1] - held[2])
    ranks[0].generations.leave()
    torch.testing.assert_close(compute_logits(ranks[1:]), before, atol=TOLERANCE, rtol=0)
    reads.clear()
    commit_everywhere(ranks[1:], generation_of(4, ranks[1:], num_redundant=NUM_EXPERTS))
    assert not reads, "every expert was on one of the ranks"
    torch.testing.assert_close(compute_logits(ranks[1:]), before, atol=TOLERANCE, rtol=0)


def test_experts_that_stay_on_a_rank_are_not_copied(checkpoint: Path) -> None:
    ranks = [ThreadRank("r0", checkpoint, ThreadNetwork())]
    commit_everywhere(ranks, generation_of(1, ranks))
    shard = ranks[0].model.sparse_layers[0][1].shard
    before = [id(weight) for weight in shard.gate_up]
    reversed_ = generation(
        2,
        ["r0"],
        tuple((tuple(reversed(slots)),) for (slots,) in generation_of(1, ranks).placement),
    )
    commit_everywhere(ranks, reversed_)
    shard = ranks[0].model.sparse_layers[0][1].shard
    after = [id(weight) for weight in shard.gate_up]
    assert after == before[::-1]


def test_experts_keep_their_bits_through_a_transfer(checkpoint: Path) -> None:
    for form in ExpertForm:
        store = ThreadRank("r0", checkpoint, ThreadNetwork(), form=form).store
        expert = store.read(ExpertKey(1, 3))
        sent = store.to_parts(expert)
        buffers = store.new_parts(ExpertKey(1, 3))
        assert [(part.shape, part.dtype) for part in buffers] == [
            (part.shape, part.dtype) for part in sent
        ]
        again = store.to_parts(store.from_parts([part.clone() for part in sent]))
        assert all(torch.equal(one, other) for one, other in zip(sent, again, strict=True))


class LostSenderGroup(ThreadGroup):
    """A group whose members announce their experts and then fail to send them."""

    def send(self, tensor: Tensor, target: int) -> None:
        raise TimeoutError("the network is gone")


def test_experts_that_other_ranks_fail_to_send_are_read_from_the_checkpoint(
    checkpoint: Path, expected: Tensor, reads: list[ExpertKey], caplog: pytest.LogCaptureFixture
) -> None:
    network = ThreadNetwork()
    ranks = [ThreadRank(f"r{number}", checkpoint, network) for number in range(3)]
    commit_everywhere(ranks[:2], generation_of(1, ranks[:2]))
    reads.clear()
    join = network.join

    def join_lost_sender(
        name: str, of: Generation, rank: int, device: torch.device, timeout_s: float
    ) -> Group:
        group = join(name, of, rank, device, timeout_s)
        if isinstance(group, ThreadGroup) and name.startswith("weights"):
            return LostSenderGroup(group._meeting, group.rank)
        return group

    for rank in ranks:
        rank.join = join_lost_sender
    commit_everywhere(ranks, generation_of(2, ranks))
    assert "this rank reads the missing experts from the checkpoint" in caplog.text
    assert reads
    torch.testing.assert_close(compute_logits(ranks), expected, atol=TOLERANCE, rtol=0)


def test_experts_are_read_from_the_checkpoint_if_the_group_for_weights_fails(
    checkpoint: Path, expected: Tensor, reads: list[ExpertKey]
) -> None:
    network = ThreadNetwork()
    network.unreachable = {"weights-0"}
    ranks = [ThreadRank(f"r{number}", checkpoint, network) for number in range(2)]
    commit_everywhere(ranks[:1], generation_of(1, ranks[:1]))
    commit_everywhere(ranks, generation_of(2, ranks))
    torch.testing.assert_close(compute_logits(ranks), expected, atol=TOLERANCE, rtol=0)
    assert len(reads) == NUM_LAYERS * NUM_EXPERTS + NUM_LAYERS * NUM_EXPERTS // 2
