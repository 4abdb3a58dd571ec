"""Ranks of expert-parallel groups as threads of one process, each with its own model.

For the tests of expert-parallel workers and layers.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from baton_engine.distributed.group import Group, LoneGroup, ParallelContext
from baton_engine.distributed.group_errors import GroupBrokenError
from baton_engine.models.checkpoint.checkpoint_config import load_checkpoint_config
from baton_engine.models.checkpoint.sharding import ALONE
from baton_engine.models.factory import load_model
from baton_engine.models.forward_context import forward_context
from baton_engine.models.layers import CausalLM
from baton_engine.worker.experts.expert_weights import ExpertForm, ExpertStore
from baton_engine.worker.experts.generations import ExpertWorker, Generations
from baton_engine.worker.experts.preparation import PreparationState
from baton_engine.worker.forward.dummy_steps import no_batch
from baton_engine.worker.packed_weights import pack_weights, quantize_weights
from baton_protocol.topology import Generation, Placement, TopologyMember
from support.engine.model_cases import (
    CPU,
    DEADLINE_S,
    Meeting,
    ThreadGroup,
    chunk_batch,
    new_kv_cache,
)
from support.waiting import eventually


def thread_groups(size: int) -> list[Group]:
    meeting = Meeting(size)
    return [LoneGroup()] if size == 1 else [ThreadGroup(meeting, rank) for rank in range(size)]


def place_experts(
    num_layers: int, num_experts: int, num_ranks: int, num_redundant: int = 0
) -> Placement:
    """Place the experts round-robin over the ranks, rotated by one in every layer.

    The remaining slots hold second replicas of the first experts.
    """
    num_slots = -(-(num_experts + num_redundant) // num_ranks)
    return tuple(
        tuple(
            tuple((layer + rank + slot * num_ranks) % num_experts for slot in range(num_slots))
            for rank in range(num_ranks)
        )
        for layer in range(num_layers)
    )


def generation(
    number: int, names: Sequence[str], placement: Placement, nonce: str = ""
) -> Generation:
    members = tuple(TopologyMember(name, name, "127.0.0.1", 0, 0, 0) for name in names)
    return Generation(number, nonce or f"nonce-{number}", members, placement, "127.0.0.1", 0)


class ThreadNetwork:
    """The process groups of all generations. Ranks, which run as threads, join them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._meetings: dict[tuple[str, str], Meeting] = {}
        #: Names of groups that no rank can join.
        self.unreachable: set[str] = set()

    def join(
        self, name: str, generation: Generation, rank: int, device: torch.device, timeout_s: float
    ) -> Group:
        if name in self.unreachable:
            raise TimeoutError(f"group {name} is unreachable")
        if generation.size == 1:
            return LoneGroup()
        with self._lock:
            meeting = self._meetings.setdefault((generation.nonce, name), Meeting(generation.size))
        group = ThreadGroup(meeting, rank)
        group.all_reduce(torch.zeros(1))
        return group


class ThreadRank:
    """A rank with a model that was loaded without experts, and its `Generations`."""

    def __init__(
        self,
        name: str,
        path: Path,
        network: ThreadNetwork,
        parallel: ParallelContext = ALONE,
        form: ExpertForm = ExpertForm.PACKED,
        compatibility_hash: str = "the same",
    ) -> None:
        config = load_checkpoint_config(path)
        self.name = name
        self.model = load_model(path, config, torch.float32, CPU, parallel, expert_parallel=True)
        if form is ExpertForm.PACKED:
            pack_weights(self.model)
        elif form is not ExpertForm.PLAIN:
            quantize_weights(self.model, form.name.lower())
        self.store = ExpertStore(path, self.model, torch.float32, CPU, form)
        #: Tests replace it.
        self.join = network.join
        self.generations = Generations(
            ExpertWorker(
                name,
                parallel.tensor.rank,
                self.store,
                compatibility_hash,
                lambda *args: self.join(*args),
                DEADLINE_S,
            )
        )


def commit_everywhere(ranks: Sequence[ThreadRank], generation: Generation) -> None:
    prepare_everywhere(ranks, generation)
    for rank in ranks:
        rank.generations.commit(generation.nonce)


def prepare_everywhere(ranks: Sequence[ThreadRank], generation: Generation) -> None:
    for rank in ranks:
        rank.generations.prepare(generation)
    for rank in ranks:
        status = eventually(
            lambda rank=rank: (
                (found := rank.generations.preparation()).state is not PreparationState.PREPARING
                and found
            ),
            timeout_s=DEADLINE_S,
            what=f"{rank.name} prepares",
        )
        assert status.state is PreparationState.PREPARED, status


@torch.inference_mode()
def run_expert_parallel(
    model: CausalLM, sequences: list[list[int]], chunk: int, waves: Sequence[tuple[int, ...]]
) -> Tensor:
    """Run `sequences` as `model_cases.run_model` does, in the steps of an expert-parallel group.

    Args:
        waves: per step, the number of tokens of every rank. A step in which this rank has no
            tokens is a dummy batch.

    Raises:
        GroupBrokenError: the group broke during a step. The error is raised at the step's end.
    """
    num_tokens = len(sequences[0]) if sequences else 0
    kv_cache = new_kv_cache(model, max(1, num_tokens), max(1, len(sequences)))
    logits: list[Tensor] = []
    for index, wave_tokens in enumerate(waves):
        start, end = index * chunk, min((index + 1) * chunk, num_tokens)
        if start >= end:
            context = no_batch(kv_cache, CPU)
            context.wave_tokens = wave_tokens
            with forward_context(context):
                model.run_dummy_batch()
        else:
            batch = chunk_batch(sequences, start, end, kv_cache)
            context = batch.context
            context.wave_tokens = wave_tokens
            with forward_context(context):
                hidden = model(batch.input_ids, batch.positions)
            logits.append(model.compute_logits(hidden).view(len(sequences), end - start, -1))
        if context.broken is not None:
            raise GroupBrokenError(str(context.broken))
    return torch.cat(logits, dim=1) if logits else torch.empty(0)


def compute_waves(sequences: Sequence[list[list[int]]], chunk: int) -> list[tuple[int, ...]]:
    """Return the number of tokens of every rank per step, until all sequences have ended.

    Args:
        sequences: by rank. The sequences of one rank have equal lengths.
    """
    lengths = [len(own[0]) if own else 0 for own in sequences]
    steps = max(-(-length // chunk) for length in lengths)
    return [
        tuple(
            len(own) * max(0, min(chunk, length - step * chunk))
            for own, length in zip(sequences, lengths, strict=True)
        )
        for step in range(steps)
    ]
