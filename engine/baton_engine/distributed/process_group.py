"""Process groups over torch's gloo and NCCL backends, each built directly on a store: there is no default group.

A group lives in its generation's part of the store, so that the ranks of a new topology meet without tearing down the old one,
and a straggler of an old generation can never join a new group.
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from baton_engine.distributed.gloo_connections import (
    Address,
    connected_from,
    connections_among,
    end_connections,
    open_device,
    shut_out_strangers,
)
from baton_engine.distributed.group import Group, LoneGroup, ParallelContext
from baton_engine.distributed.group_errors import GroupBrokenError
from baton_engine.distributed.rows import row_bytes
from baton_engine.distributed.shared_memory_group import over_shared_memory
from baton_engine.distributed.store.socket_store import connect_store
from baton_engine.distributed.store.wire import StoreAddress
from baton_protocol.config import ParallelConfig, pod_ip

logger = logging.getLogger(__name__)

Backend = Any
"""ProcessGroupGloo or ProcessGroupNCCL: torch's stubs do not know their methods."""
End = Callable[[Backend], None]
"""Makes a backend's operations under way fail, from any thread."""
GENERATION_KEY = re.compile(r"generation-([0-9]{1,18})\b")
"""See `generation_store`."""


def generation_store(store: Store, number: int, nonce: str = "") -> Store:
    """A generation's part of the store. Two attempts at one number have different nonces, and never meet."""
    return PrefixStore(f"generation-{number}-{nonce}" if nonce else f"generation-{number}", store)


def is_before(number: int) -> Callable[[str], bool]:
    """Of a key of the store: whether it is of a generation with a lower number."""

    def is_outdated(key: str) -> bool:
        of_generation = GENERATION_KEY.match(key)
        return of_generation is not None and int(of_generation[1]) < number

    return is_outdated


def create_group(
    name: str,
    rank: int,
    size: int,
    store: Store,
    generation: int,
    device: torch.device,
    timeout_s: float,
    *,
    nonce: str = "",
    join_timeout_s: float | None = None,
    host: str | None = None,
) -> Group:
    """Joins a group; returns once all members have.

    Args:
        name: the same for all members, unique within the generation.
        store: reachable by all members. Its timeout is set: groups that are joined through it at the same time need the same.
        device: what tensors will be on. cpu: gloo, and shared memory if all members are on one host; cuda: NCCL.
        timeout_s: of every operation.
        nonce: of the attempt at this generation; see `generation_store`.
        join_timeout_s: of joining; None: as for operations.
        host: this rank's own address, for gloo; None: the pod's.

    Raises:
        TimeoutError: not all members came.
        GroupBrokenError: one came and is gone.
    """
    if size == 1:
        return LoneGroup()
    join_timeout_s = timeout_s if join_timeout_s is None else join_timeout_s
    part = PrefixStore(name, generation_store(store, generation, nonce))
    part.set_timeout(timedelta(seconds=join_timeout_s))
    connect = _gloo if device.type == "cpu" else _nccl
    try:
        with contextlib.ExitStack() as undo:
            backend, end = connect(part, rank, size, timedelta(seconds=join_timeout_s), host)
            group = TorchGroup(name, rank, size, backend, join_timeout_s, end, store)
            undo.callback(group.close)
            group.all_reduce(
                torch.zeros(1, device=device)
            )  # NCCL connects here: a missing member shows now, not later
            group.set_timeout(timeout_s)
            joined = (
                over_shared_memory(group, name, part, timeout_s) if device.type == "cpu" else group
            )
            undo.pop_all()
    except GroupBrokenError:
        raise
    except RuntimeError as error:
        raise TimeoutError(
            f"group {name} of generation {generation}: rank {rank} waited {join_timeout_s:.0f} s for the other "
            f"{size - 1} members ({error})"
        ) from error
    logger.info("group %s of generation %d: rank %d of %d joined", name, generation, rank, size)
    return joined


def create_parallel_context(
    parallel: ParallelConfig,
    rank: int,
    store_address: StoreAddress,
    generation: int,
    device: torch.device,
    timeout_s: float,
    *,
    host: str | None = None,
    secret: bytes = b"",
) -> ParallelContext:
    """Joins the groups of global rank `rank`. Collective over all ranks of `parallel`; arguments as in `create_group`.

    Args:
        secret: the store's; see `store_proof`.

    Raises:
        TimeoutError: the store does not answer, or not all ranks came.
    """
    if parallel.world_size == 1:
        return ParallelContext()
    store = connect_store(store_address, timeout_s, secret)
    tensor_size, pipeline_size = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    stage, tensor_rank = divmod(rank, tensor_size)

    def join(name: str, rank: int, size: int) -> Group:
        return create_group(name, rank, size, store, generation, device, timeout_s, host=host)

    return ParallelContext(
        tensor=join(f"tensor-of-stage-{stage}", tensor_rank, tensor_size),
        pipeline=join(f"pipeline-of-tensor-rank-{tensor_rank}", stage, pipeline_size),
    )


class TorchGroup:
    """A `Group` over one of torch's backends. See `create_group`."""

    def __init__(
        self,
        name: str,
        rank: int,
        size: int,
        backend: Backend,
        timeout_s: float,
        end: End,
        store: Store,
    ) -> None:
        self.name = name
        self.rank = rank
        self.size = size
        self._backend: Backend | None = backend
        self._store: Store | None = store
        """In which NCCL connects two ranks when one first sends to the other: the backend keeps only the half that is C++."""
        self._timeout_s = timeout_s
        self._end = end
        self._broken = ""
        self._closing = threading.Lock()

    def set_timeout(self, timeout_s: float) -> None:
        """Of the operations to come."""
        assert self._backend is not None
        self._timeout_s = timeout_s
        self._backend.set_timeout(self._timeout)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        dense = tensor.contiguous()
        self._run("all_reduce", self._others, lambda backend: backend.allreduce([dense]))
        if dense is not tensor:
            tensor.copy_(dense)
        return tensor

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        dense = tensor.contiguous()
        parts = dense.new_empty(self.size * dense.numel())
        self._run(
            "all_gather",
            self._others,
            lambda backend: backend._allgather_base(parts, dense.view(-1)),
        )
        return torch.cat(parts.view(self.size, *dense.shape).unbind(0), dim)

    def all_to_all(
        self, rows: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int]
    ) -> Tensor:
        received, source, target, send_nbytes, recv_nbytes = row_bytes(
            rows, send_counts, recv_counts, self.size
        )
        self._run(
            "all_to_all",
            self._others,
            lambda backend: backend.alltoall_base(target, source, recv_nbytes, send_nbytes),
        )
        return received

    def send(self, tensor: Tensor, target: int) -> None:
        dense = tensor.contiguous()
        self._run("send", [target], lambda backend: backend.send([dense], target, 0), self._timeout)

    def recv(self, tensor: Tensor, source: int) -> Tensor:
        dense = (
            tensor
            if tensor.is_contiguous()
            else torch.empty_like(tensor, memory_format=torch.contiguous_format)
        )
        self._run("recv", [source], lambda backend: backend.recv([dense], source, 0), self._timeout)
        if dense is not tensor:
            tensor.copy_(dense)
        return tensor

    def abort(self) -> None:
        with self._closing:  # what is closed has no connections any more
            if self._backend is not None and not self._broken:
                self._broken = "the group was aborted"
                self._end(self._backend)

    def close(self) -> None:
        with self._closing:
            backend, self._backend = self._backend, None
            self._store = None
        if backend is not None:
            backend.shutdown()

    @property
    def _others(self) -> Sequence[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    @property
    def _timeout(self) -> timedelta:
        return timedelta(seconds=self._timeout_s)

    def _run(
        self,
        operation: str,
        peers: Sequence[int],
        start: Callable[[Backend], Any],
        timeout: timedelta | None = None,
    ) -> None:
        """Starts an operation and waits for it. Its errors get to say who and where.

        Args:
            timeout: None: the backend's own. (Between two ranks gloo would go by the one with which it connected.)
        """
        where = f"{operation} in group {self.name}, rank {self.rank} of {self.size}, with {_ranks(peers)}"
        if self._broken:
            raise GroupBrokenError(f"{where}: {self._broken}")
        backend = self._backend
        if backend is None:
            raise RuntimeError(f"{where}: the group is closed")
        try:
            start(backend).wait(*[timeout] if timeout else [])
        except RuntimeError as error:
            reason = str(error).lower()
            if self._broken:
                raise GroupBrokenError(f"{where}: {self._broken}") from error
            if "timed out" in reason or "timeout" in reason:
                self._broken = f"an earlier operation, {operation}, had no answer in time"
                raise TimeoutError(
                    f"{where}: no answer within {self._timeout_s:.0f} s ({error})"
                ) from error
            if "connection" in reason or "broken pipe" in reason:
                raise GroupBrokenError(f"{where}: a member is gone ({error})") from error
            raise RuntimeError(f"{where}: failed ({error})") from error
        finally:
            del (
                backend
            )  # an error that somebody keeps must not keep it, its sockets and its threads


def _ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _gloo(
    store: Store, rank: int, size: int, timeout: timedelta, host: str | None
) -> tuple[Backend, End]:
    """The backend, connected to all members, and what ends its connections."""
    gloo: Any = dist.ProcessGroupGloo
    device, (own_host, port) = open_device(host or pod_ip())
    options = gloo._Options()
    options._devices = [device]
    options._timeout = timeout
    store.set(f"listens-{rank}", f"{port} {own_host}")
    backend = gloo(store, rank, size, options)
    listening = store.multi_get([f"listens-{other}" for other in range(size)])
    told = [f"connected-{other}" for other in range(size)]
    addresses = [address.decode().split(maxsplit=1) for address in listening]
    members = [(host, int(port)) for port, host in addresses]
    connections = connections_among(members)
    assert len(connections) >= size - 1, "gloo connects every member with every other over TCP"
    store.set(f"connected-{rank}", msgspec.json.encode(connected_from(members)).decode())
    others = [
        msgspec.json.decode(each, type=list[tuple[Address, Address]])
        for each in store.multi_get(told)
    ]
    own = (own_host, port)
    num_strangers = shut_out_strangers(
        own, {source for each in others for source, target in each if target == own}
    )
    if num_strangers:
        logger.warning(
            "cut off %d connections to gloo at %s:%d that are of no member", num_strangers, *own
        )
    return backend, lambda _: end_connections(connections)


def _nccl(
    store: Store, rank: int, size: int, timeout: timedelta, host: str | None
) -> tuple[Backend, End]:
    """The backend, which finds its own address, and what ends its operations.

    They are ordered by the CUDA stream, and return before they are done: one that `abort` ends leaves unfinished data behind, so
    who aborts must not use the results of the step. A lost member ends this process through NCCL's watchdog.
    """
    if not dist.is_nccl_available():
        raise RuntimeError(
            "this build of torch has no NCCL, which parallel workers on CUDA devices need; install one that has"
        )
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timeout
    backend = nccl(store, rank, size, options)
    return backend, lambda backend: backend.abort()
