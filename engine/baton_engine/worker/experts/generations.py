"""The generations of an expert-parallel group as one worker sees them: one that serves, and perhaps one prepared beside it.

A thread of low priority prepares: it joins the generation's expert group, gets the experts that this worker lacks (from members
that hold them, else from the checkpoint), and puts together the layers' shards. Experts that are here already are shared. To adopt
the generation is then to give every sparse layer its new shard.

All methods are called by the worker's thread, except `interrupt`.
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

from baton_engine.distributed.group import Group
from baton_engine.distributed.group_errors import GroupBrokenError
from baton_engine.distributed.process_group import create_group
from baton_engine.distributed.store.socket_store import connect_store
from baton_engine.distributed.store.wire import StoreAddress
from baton_engine.models.expert_parallel import ExpertShard
from baton_engine.worker.experts.expert_exchange import exchange_experts, wanted_by
from baton_engine.worker.experts.expert_weights import Expert, ExpertKey, ExpertStore, stack_experts
from baton_engine.worker.experts.preparation import Preparation, PreparationState
from baton_protocol.topology import ExpertLoads, Generation

logger = logging.getLogger(__name__)

NICENESS = 10
"""Of threads that prepare: a serving step goes first."""
PEER_TIMEOUT_S = 30.0
"""A member that sends no expert for so long is given up: the checkpoint has them all."""
GRACE_S = 5.0
"""Groups of a generation that served are left so late: a slower member may still read what was sent in its last step."""
CPU = torch.device("cpu")


class Join(Protocol):
    """Joins a group of a generation, all members of which do so."""

    def __call__(
        self, name: str, generation: Generation, rank: int, device: torch.device, timeout_s: float
    ) -> Group: ...


def join_group(join_timeout_s: float, secret: bytes = b"") -> Join:
    """Through the generation's store; who waits longer than `join_timeout_s` for the others raises TimeoutError.

    Args:
        secret: the store's; see `store_proof`.
    """

    def join(
        name: str, generation: Generation, rank: int, device: torch.device, timeout_s: float
    ) -> Group:
        return create_group(
            name,
            rank,
            generation.size,
            connect_store(
                StoreAddress(generation.store_host, generation.store_port), join_timeout_s, secret
            ),
            generation.number,
            device,
            timeout_s,
            nonce=generation.nonce,
            join_timeout_s=join_timeout_s,
        )

    return join


@dataclass(frozen=True, slots=True)
class ExpertWorker:
    """What a worker brings into every generation."""

    instance_id: str
    """Of its engine."""
    tensor_rank: int
    """In its engine: workers of one tensor rank form an expert group."""
    store: ExpertStore
    compatibility_hash: str
    """Equal on workers with the same weights; others cannot be members of one generation."""
    join: Join
    timeout_s: float
    """Of exchanges in steps."""


class Generations:
    def __init__(self, worker: ExpertWorker) -> None:
        self._worker = worker
        self._prepared: _LocalGeneration | None = None
        """What is being prepared, or is prepared, or failed."""
        self._current: _LocalGeneration | None = None

    def prepare(self, generation: Generation) -> None:
        """Begins to prepare; returns at once. What was prepared before is dropped; one that is known already changes nothing.

        Raises:
            ValueError: this engine is no member.
        """
        rank = generation.rank_of(self._worker.instance_id)
        if rank is None:
            raise ValueError(
                f"generation {generation.number} does not have {self._worker.instance_id} as a member"
            )
        known = (
            each.generation.nonce for each in (self._prepared, self._current) if each is not None
        )
        if generation.nonce in known:
            return
        self._drop()
        self._prepared = _LocalGeneration(generation, rank, self._worker, self._current)

    def preparation(self) -> Preparation:
        return Preparation() if self._prepared is None else self._prepared.status

    def commit(self, nonce: str) -> None:
        """Steps are of the prepared generation from now on. Raises ValueError if that is not what was prepared."""
        prepared, status = self._prepared, self.preparation()
        if (
            prepared is None
            or status.nonce != nonce
            or status.state is not PreparationState.PREPARED
        ):
            raise ValueError(f"generation {nonce} cannot be adopted: {status}")
        retired, self._current, self._prepared = self._current, prepared, None
        self._give_layers(prepared.shards)
        logger.info("serves in generation %d as rank %d", prepared.generation.number, prepared.rank)
        if retired is not None:
            retired.close(GRACE_S)

    def drop(self, nonce: str) -> None:
        """What is prepared, if it is that generation."""
        if self._prepared is not None and self._prepared.generation.nonce == nonce:
            self._drop()

    def leave(self) -> None:
        """Serves in no generation and prepares none: experts are freed."""
        self._drop()
        current, self._current = self._current, None
        self._give_layers([None] * len(self._worker.store.layers))
        if current is not None:
            current.close(GRACE_S)

    def interrupt(self, nonce: str = "") -> None:
        """Gives up the group that steps exchange in, so that one which waits in it fails at once. By any thread.

        Args:
            nonce: only if it is that generation's; empty: whichever it is.
        """
        current = self._current
        if current is not None and nonce in ("", current.generation.nonce):
            current.abort()

    def loads(self) -> ExpertLoads:
        """Of the current generation; empty without one."""
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
    """One generation on this worker, from the beginning of its preparation to its end."""

    def __init__(
        self,
        generation: Generation,
        rank: int,
        worker: ExpertWorker,
        before: _LocalGeneration | None,
    ) -> None:
        """Begins.

        Args:
            before: the generation whose experts are shared.
        """
        self.generation = generation
        self.rank = rank
        self.experts: dict[ExpertKey, Expert] = {}
        """That this worker holds. Complete once prepared; none if that failed."""
        self.shards: list[ExpertShard] = []
        self._worker = worker
        self._before = before
        """Only while it is prepared."""
        self._lock = threading.Lock()
        """Guards what follows: the thread adds, `abort` and `close` end."""
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
        """Operations in its groups fail at once, in all threads. Idempotent, also when closed."""
        with self._lock:
            groups = list(self._groups)
        for group in groups:
            group.abort()

    def close(self, grace_s: float = 0.0) -> None:
        """Leaves its groups after `grace_s`, in the background: without waiting for a thread that still prepares. Idempotent."""
        with self._lock:
            self._closed = True
        threading.Thread(
            target=self._close, args=(grace_s,), name=f"close-{self.generation.number}", daemon=True
        ).start()

    def _close(self, grace_s: float) -> None:
        self._thread.join()  # it ends soon: its groups are aborted, or it waits for members no longer than it may
        self.experts, self.shards = {}, []  # memory has no grace
        time.sleep(grace_s)
        with self._lock:
            groups, self._groups = self._groups, []
        for group in groups:
            group.close()

    def _run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        try:
            if self._worker.store.device.type == "cuda":
                torch.cuda.set_device(
                    self._worker.store.device
                )  # the worker's: new threads begin with the first
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
                "generation %d cannot be prepared: %s", self.generation.number, status.reason
            )
            self.abort()  # the others need not wait for this one

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
            "generation %d prepared in %.2f s as rank %d of %d: %d experts were here, %d came from other ranks, %d were read",
            generation.number,
            time.monotonic() - started,
            self.rank,
            generation.size,
            num_shared,
            num_sent,
            len(wanted) - num_shared - num_sent,
        )

    def _ask_members(self, held: Mapping[ExpertKey, Expert]) -> None:
        """Gets from them what they hold, and sends them what they lack. `held` may be more than this rank keeps."""
        try:
            group = self._join(f"weights-{self._worker.tensor_rank}", CPU, PEER_TIMEOUT_S)
        except (GroupBrokenError, TimeoutError) as error:
            self._check_open()
            logger.warning(
                "experts are read from the checkpoint, for ranks cannot exchange them: %s", error
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
            self._groups.append(
                group
            )  # before it is looked whether somebody closes this: one of both ends the group
        self._check_open()
        return group

    def _check_open(self) -> None:
        if self._closed:
            raise GroupBrokenError("the generation was dropped while it was prepared")

    def _check_placement(self) -> None:
        num_layers = len(self._worker.store.layers)
        if len(self.generation.placement) != num_layers:
            raise ValueError(
                f"{len(self.generation.placement)} layers are placed, but the model has {num_layers}"
            )
        for layer, ranks in enumerate(self.generation.placement):
            experts = {expert for slots in ranks for expert in slots}
            if len(ranks) != self.generation.size or experts != set(
                range(self._worker.store.num_experts)
            ):
                raise ValueError(
                    f"the placement of sparse layer {layer} is not of these ranks, or not of all experts"
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
                self.experts.update(
                    zip(keys, map(Expert, gate_up, down), strict=True)
                )  # once in memory, not twice
        return ExpertShard(group, placement, self._worker.store.num_experts, gate_up, down, device)
