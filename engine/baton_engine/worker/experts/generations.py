"""The current and the next generation of an expert-parallel group, on one worker.

A generation is a fixed set of ranks with a placement of experts on these ranks. A low-priority
thread prepares the next generation. The thread joins the expert group, gets the experts that this
worker lacks, and builds a shard for each sparse layer. Members send the experts that they hold. The
thread reads all other missing experts from the checkpoint. Both generations share the experts that
the worker already holds. A commit gives each sparse layer its new shard.

Only the worker's thread may call the methods of `Generations`, except `interrupt`.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from baton_engine.distributed.group import RETIREMENT_GRACE_S, Group
from baton_engine.distributed.group_errors import GroupBrokenError
from baton_engine.models.expert_shard import ExpertShard
from baton_engine.worker.experts.expert_exchange import exchange_experts, wanted_by
from baton_engine.worker.experts.expert_weights import Expert, ExpertKey, ExpertStore, stack_experts
from baton_engine.worker.experts.preparation import Preparation, PreparationState
from baton_protocol.topology import ExpertLoads, Generation

logger = logging.getLogger(__name__)

#: Niceness of threads that prepare a generation, so that serving steps have priority.
NICENESS = 10
#: Timeout of one operation while members exchange experts, in seconds. If a member does not
#: respond, the missing experts are read from the checkpoint.
PEER_TIMEOUT_S = 30.0
CPU = torch.device("cpu")


class Join(Protocol):
    """Function that joins a process group of the ranks of a generation. Collective.

    `timeout_s` is the timeout of one operation in the group. The function raises TimeoutError if
    not all members join in time.
    """

    def __call__(
        self, name: str, generation: Generation, rank: int, device: torch.device, timeout_s: float
    ) -> Group: ...


@dataclass(frozen=True, slots=True)
class ExpertWorker:
    """The properties of a worker that are the same in all generations."""

    #: Id of the worker's engine.
    instance_id: str
    #: Rank of the worker in the engine. Workers with the same tensor rank form an expert group.
    tensor_rank: int
    store: ExpertStore
    #: Equal on workers with the same weights. All members of a generation must have the same hash.
    compatibility_hash: str
    join: Join
    #: Timeout of one exchange with other ranks in a step.
    timeout_s: float


class Generations:
    """The current generation, in which steps run, and the next generation in preparation.

    A generation is a fixed set of ranks with a placement of experts on these ranks.
    """

    def __init__(self, worker: ExpertWorker) -> None:
        self._worker = worker
        #: The next generation: in preparation, prepared, or failed.
        self._prepared: _LocalGeneration | None = None
        self._current: _LocalGeneration | None = None

    def prepare(self, generation: Generation) -> None:
        """Start to prepare a generation in the background.

        If `generation` is already the current or the next generation, do nothing. Otherwise, drop
        the next generation, if there is one, and make `generation` the next.

        Raises:
            ValueError: this engine is not a member of `generation`.
        """
        rank = generation.rank_of(self._worker.instance_id)
        if rank is None:
            raise ValueError(
                f"{self._worker.instance_id} is not a member of generation {generation.number}"
            )
        known = (
            each.generation.nonce for each in (self._prepared, self._current) if each is not None
        )
        if generation.nonce in known:
            return
        self._drop()
        self._prepared = _LocalGeneration(generation, rank, self._worker, self._current)

    def preparation(self) -> Preparation:
        """Return the state of the preparation of the next generation."""
        return Preparation() if self._prepared is None else self._prepared.status

    def commit(self, nonce: str) -> None:
        """Make the prepared generation current. Later steps run in this generation.

        Raises:
            ValueError: no generation with this nonce is prepared.
        """
        prepared, status = self._prepared, self.preparation()
        if (
            prepared is None
            or status.nonce != nonce
            or status.state is not PreparationState.PREPARED
        ):
            raise ValueError(
                f"generation {nonce} cannot be committed: the next generation of this worker is "
                f"{status.nonce or 'unknown'}, and its state is {status.state} "
                f"({status.reason or 'no failure'})"
            )
        retired, self._current, self._prepared = self._current, prepared, None
        self._give_layers(prepared.shards)
        logger.info(
            "this worker serves in generation %d (ranks and expert placement) as rank %d",
            prepared.generation.number,
            prepared.rank,
        )
        if retired is not None:
            retired.close(RETIREMENT_GRACE_S)

    def drop(self, nonce: str) -> None:
        """Drop the next generation, prepared or not, if it has this nonce."""
        if self._prepared is not None and self._prepared.generation.nonce == nonce:
            self._drop()

    def leave(self) -> None:
        """Leave the current generation, and free all experts.

        The next generation, if there is one, is dropped.
        """
        self._drop()
        current, self._current = self._current, None
        self._give_layers([None] * len(self._worker.store.layers))
        if current is not None:
            current.close(RETIREMENT_GRACE_S)

    def interrupt(self, nonce: str = "") -> None:
        """Abort the current generation's process groups. A step that waits for a rank then fails.

        This method can be called from any thread.

        Args:
            nonce: nonce of the generation to interrupt. Do nothing if another generation is
                current. Empty: interrupt the current generation.
        """
        current = self._current
        if current is not None and nonce in ("", current.generation.nonce):
            current.abort()

    def expert_bytes(self) -> int:
        """Return how many bytes are sent to move this tensor rank's part of one expert."""
        parts = self._worker.store.new_parts(ExpertKey(layer=0, expert=0))
        return sum(part.nbytes for part in parts)

    def loads(self) -> ExpertLoads:
        """Return how many tokens this rank has routed to each expert, by sparse layer.

        The counts begin with the current generation. Without a generation, the result is empty.
        """
        shards = self._current.shards if self._current is not None else []
        return ExpertLoads(tuple(tuple(shard.tokens.tolist()) for shard in shards))

    def _drop(self) -> None:
        dropped, self._prepared = self._prepared, None
        if dropped is not None:
            dropped.close()
            dropped.abort()

    def _give_layers(self, shards: Sequence[ExpertShard | None]) -> None:
        for layer, shard in zip(self._worker.store.layers, shards, strict=True):
            layer.shard = shard


class _LocalGeneration:
    """One generation on this worker.

    It exists from the start of the preparation until the worker leaves the generation.
    """

    def __init__(
        self,
        generation: Generation,
        rank: int,
        worker: ExpertWorker,
        before: _LocalGeneration | None,
    ) -> None:
        """Start the thread that prepares the generation.

        Args:
            before: current generation, if any. Experts that both generations have are reused.
        """
        self.generation = generation
        self.rank = rank
        #: The experts of this worker: complete after the preparation, empty after a failure.
        self.experts: dict[ExpertKey, Expert] = {}
        self.shards: list[ExpertShard] = []
        self._worker = worker
        #: The generation whose experts are reused. None after the preparation.
        self._before = before
        #: Guards the attributes below, which several threads use.
        self._lock = threading.Lock()
        self._status = Preparation(generation.nonce, PreparationState.PREPARING)
        self._groups: list[Group] = []
        self._closed = False
        self._thread = threading.Thread(
            target=self._run, name=f"prepare-{generation.number}", daemon=True
        )
        self._thread.start()

    @property
    def status(self) -> Preparation:
        with self._lock:
            return self._status

    def abort(self) -> None:
        """Abort all operations in the process groups of this generation, in all threads.

        May be called more than once, and after `close`.
        """
        with self._lock:
            groups = list(self._groups)
        for group in groups:
            group.abort()

    def close(self, grace_s: float = 0.0) -> None:
        """Leave the process groups of this generation in the background. Idempotent.

        A background thread waits until the preparation has ended, and then for `grace_s` seconds.
        """
        with self._lock:
            self._closed = True
        threading.Thread(
            target=self._close, args=(grace_s,), name=f"close-{self.generation.number}", daemon=True
        ).start()

    def _close(self, grace_s: float) -> None:
        # The thread ends soon: its groups are aborted, or its own timeouts end its waits.
        self._thread.join()
        self.experts, self.shards = {}, []  # only the groups need the grace period
        time.sleep(grace_s)
        with self._lock:
            groups, self._groups = self._groups, []
        for group in groups:
            group.close()

    def _run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        try:
            if self._worker.store.device.type == "cuda":
                # The current device of a new thread is the first device.
                torch.cuda.set_device(self._worker.store.device)
            self._prepare()
            status = Preparation(self.generation.nonce, PreparationState.PREPARED)
        except Exception as error:
            status = Preparation(
                self.generation.nonce, PreparationState.FAILED, f"{type(error).__name__}: {error}"
            )
            self.experts, self.shards = {}, []
        self._before = None
        with self._lock:
            self._status = status
            closed = self._closed
        if status.state is PreparationState.FAILED and not closed:
            logger.warning(
                "generation %d (ranks and expert placement) cannot be prepared: %s",
                self.generation.number,
                status.reason,
            )
            self.abort()  # so that other members do not wait for this worker

    @torch.no_grad()
    def _prepare(self) -> None:
        started = time.monotonic()
        worker, generation = self._worker, self.generation
        self._check_placement()
        group = self._join(f"experts-{worker.tensor_rank}", worker.store.device, worker.timeout_s)
        self._check_compatible(group)
        wanted = wanted_by(generation.placement, self.rank)
        before: Mapping[ExpertKey, Expert] = (
            self._before.experts if self._before is not None else {}
        )
        self.experts = {key: before[key] for key in wanted & before.keys()}
        num_shared = len(self.experts)
        if generation.size > 1:
            self._ask_members(before)
        num_sent = len(self.experts) - num_shared
        for key in sorted(wanted - self.experts.keys()):
            self._check_open()
            self.experts[key] = worker.store.read(key)
        self.shards = [self._make_shard(layer, group) for layer in range(len(generation.placement))]
        logger.info(
            "generation %d prepared in %.2f s as rank %d of %d; experts kept: %d, received from "
            "other ranks: %d, read from the checkpoint: %d",
            generation.number,
            time.monotonic() - started,
            self.rank,
            generation.size,
            num_shared,
            num_sent,
            len(wanted) - num_shared - num_sent,
        )

    def _ask_members(self, held: Mapping[ExpertKey, Expert]) -> None:
        """Receive missing experts from other members, and send the experts that others lack.

        Args:
            held: experts of the current generation, which this rank can send to other members.
        """
        try:
            group = self._join(f"weights-{self._worker.tensor_rank}", CPU, PEER_TIMEOUT_S)
        except (GroupBrokenError, TimeoutError) as error:
            self._check_open()
            logger.warning(
                "generation %d: this rank cannot exchange experts with other ranks, and reads the "
                "experts from the checkpoint: %s",
                self.generation.number,
                error,
            )
            return
        exchange_experts(
            group,
            self.generation.placement,
            held,
            self._worker.store,
            self.experts.__setitem__,
            lambda: self._closed,
        )
        with self._lock:
            self._groups.remove(group)
        group.close()

    def _join(self, name: str, device: torch.device, timeout_s: float) -> Group:
        self._check_open()
        group = self._worker.join(name, self.generation, self.rank, device, timeout_s)
        with self._lock:
            self._groups.append(group)
        self._check_open()  # after the append: either this or a concurrent `close` ends the group
        return group

    def _check_open(self) -> None:
        if self._closed:
            raise GroupBrokenError("the generation was dropped while it was prepared")

    def _check_placement(self) -> None:
        num_layers = len(self._worker.store.layers)
        if len(self.generation.placement) != num_layers:
            raise ValueError(
                f"the placement has {len(self.generation.placement)} sparse layers, but the model "
                f"has {num_layers}"
            )
        for layer, ranks in enumerate(self.generation.placement):
            experts = {expert for slots in ranks for expert in slots}
            if len(ranks) != self.generation.size or experts != set(
                range(self._worker.store.num_experts)
            ):
                raise ValueError(
                    f"the placement of sparse layer {layer} is not for these ranks, or lacks an "
                    "expert"
                )

    def _check_compatible(self, group: Group) -> None:
        digest = hashlib.blake2b(self._worker.compatibility_hash.encode(), digest_size=16).digest()
        own = torch.tensor([list(digest)], dtype=torch.uint8, device=self._worker.store.device)
        differs = (group.all_gather(own, dim=0) != own).any(dim=1)
        others = [
            member.name
            for member, other in zip(self.generation.members, differs.tolist(), strict=True)
            if other
        ]
        if others:
            raise ValueError(
                f"{', '.join(others)}: another checkpoint, dtype or quantization than this rank's"
            )

    def _make_shard(self, layer: int, group: Group) -> ExpertShard:
        placement, device = self.generation.placement[layer], self._worker.store.device
        keys = [ExpertKey(layer, expert) for expert in placement[self.rank]]
        before = self._before.shards[layer] if self._before is not None else None
        if before is not None and before.slots == tuple(placement[self.rank]):
            gate_up, down = before.gate_up, before.down
        else:
            gate_up, down = stack_experts([self.experts[key] for key in keys], device)
            if isinstance(gate_up, torch.Tensor) and isinstance(down, torch.Tensor):
                # Views of the stacked copies replace the experts, so that memory holds only one
                # copy.
                self.experts.update(zip(keys, map(Expert, gate_up, down), strict=True))
        return ExpertShard(group, placement, self._worker.store.num_experts, gate_up, down, device)
