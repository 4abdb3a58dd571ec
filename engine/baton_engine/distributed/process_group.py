"""Process groups over torch's gloo and NCCL backends, without torch's default group.

A generation is one version of the topology, with its own keys in the store. The ranks of a new
generation can therefore connect while the groups of the old generation exist. A late rank of an old
generation cannot join a new group.
"""

from __future__ import annotations

import contextlib
import logging
import os
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
    reject_non_members,
)
from baton_engine.distributed.group import Group, LoneGroup, ParallelContext
from baton_engine.distributed.group_errors import GroupBrokenError
from baton_engine.distributed.row_bytes import row_bytes
from baton_engine.distributed.shared_memory_group import over_shared_memory
from baton_engine.distributed.store.socket_store import connect_store
from baton_engine.distributed.store.wire import StoreAddress
from baton_protocol.options.config import ParallelConfig, pod_ip
from baton_protocol.process.fatal import ConfigurationError
from baton_protocol.topology import Generation

logger = logging.getLogger(__name__)

#: ProcessGroupGloo or ProcessGroupNCCL. torch's stubs lack their methods.
Backend = Any
#: Makes a backend's current operations fail. Any thread may call it.
Abort = Callable[[Backend], None]
#: Environment variable to set to 1 in a network that changes the addresses of pods, such as a
#: service mesh with sidecars. A member then also accepts connections from unpublished addresses, if
#: the number of connections equals the number of published addresses.
TRANSLATED_ADDRESSES = "BATON_TRANSLATED_ADDRESSES"
#: Matches the start of a generation's store keys. Capture group 1: the generation's number.
GENERATION_KEY = re.compile(r"generation-([0-9]{1,18})\b")


def generation_store(store: Store, number: int, nonce: str = "") -> Store:
    """Return a view of the store that contains only the keys of one generation of groups.

    Each attempt to form a generation has its own nonce. Two attempts with the same generation
    number therefore share no key.
    """
    return PrefixStore(f"generation-{number}-{nonce}" if nonce else f"generation-{number}", store)


def is_before(number: int) -> Callable[[str], bool]:
    """Return a predicate that is true for the store keys of generations below `number`."""

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
    """Join a group, wait until all members have joined, and return the group.

    Args:
        name: equal for all members, unique within the generation.
        rank: this member's rank.
        size: number of members.
        store: a store that all members can reach. This call sets the store's timeout. Calls that
            use the store at the same time therefore need the same timeout.
        generation: number of the generation.
        device: device of the tensors. cpu uses gloo, and shared memory if all members are on one
            host. cuda uses NCCL.
        timeout_s: timeout of an operation.
        nonce: nonce of the generation. Attempts with different nonces share no key of the store.
        join_timeout_s: timeout of the join. None: `timeout_s`.
        host: this rank's address for gloo. None: the pod's address.

    Raises:
        ConfigurationError: the device is cuda, and torch has no NCCL.
        TimeoutError: a member did not join.
        GroupBrokenError: a member joined, but has ended or disconnected.
    """
    if size == 1:
        return LoneGroup()
    join_timeout_s = timeout_s if join_timeout_s is None else join_timeout_s
    part = PrefixStore(name, generation_store(store, generation, nonce))
    part.set_timeout(timedelta(seconds=join_timeout_s))
    connect = _gloo if device.type == "cpu" else _nccl
    try:
        with contextlib.ExitStack() as undo:
            backend, abort = connect(part, rank, size, timedelta(seconds=join_timeout_s), host)
            group = TorchGroup(name, rank, size, backend, join_timeout_s, abort, store)
            undo.callback(group.close)
            # NCCL connects in the first operation. If a member is missing, this operation fails.
            group.all_reduce(torch.zeros(1, device=device))
            group.set_timeout(timeout_s)
            joined = (
                over_shared_memory(group, name, part, timeout_s) if device.type == "cpu" else group
            )
            undo.pop_all()
    except GroupBrokenError:
        raise
    except RuntimeError as error:
        raise TimeoutError(
            f"group {name} of generation {generation}: rank {rank} waited {join_timeout_s:.0f} s "
            f"for the other {size - 1} members ({error})"
        ) from error
    logger.info(
        "process group %s of generation %d was joined as rank %d of %d",
        name,
        generation,
        rank,
        size,
    )
    return joined


def join_generation(
    name: str,
    generation: Generation,
    rank: int,
    device: torch.device,
    timeout_s: float,
    *,
    join_timeout_s: float,
    secret: bytes = b"",
) -> Group:
    """Join a group through the store of a generation, and return the group.

    Args:
        generation: the generation, with the address of its store and the number of its members.
        secret: secret that the store's server and clients must prove to have.
        name, rank, device, timeout_s, join_timeout_s: arguments of `create_group`.

    Raises:
        TimeoutError: the store does not respond.
        ConfigurationError, TimeoutError, GroupBrokenError: from `create_group`.
    """
    address = StoreAddress(generation.store_host, generation.store_port)
    return create_group(
        name,
        rank,
        generation.size,
        connect_store(address, join_timeout_s, secret),
        generation.number,
        device,
        timeout_s,
        nonce=generation.nonce,
        join_timeout_s=join_timeout_s,
    )


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
    """Join the tensor-parallel and the pipeline group of global rank `rank`, and return both.

    All ranks must call this function. `create_group` describes the arguments that are not listed
    here.

    Args:
        parallel: sizes of the groups.
        rank: global rank.
        store_address: address of the store.
        secret: secret that the store's server and clients must prove to have.

    Raises:
        ConfigurationError: the device is cuda, and torch has no NCCL.
        TimeoutError: the store does not respond, or a rank did not join.
        GroupBrokenError: a rank joined, but has ended or disconnected.
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
    """A `Group` over gloo or NCCL. `create_group` creates its connections."""

    def __init__(
        self,
        name: str,
        rank: int,
        size: int,
        backend: Backend,
        timeout_s: float,
        abort: Abort,
        store: Store,
    ) -> None:
        self.name = name
        self.rank = rank
        self.size = size
        self._backend: Backend | None = backend
        #: NCCL uses the store when two ranks first exchange data with send and recv. This
        #: reference keeps the Python object alive. The backend keeps only the C++ object alive.
        self._store: Store | None = store
        self._timeout_s = timeout_s
        self._abort = abort
        self._broken = ""
        self._closing = threading.Lock()

    def set_timeout(self, timeout_s: float) -> None:
        """Set the timeout of later operations."""
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
        with self._closing:
            if self._backend is not None and not self._broken:
                self._broken = "the group was aborted"
                self._abort(self._backend)

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
        """Start an operation and wait for its end.

        Args:
            operation: name of the operation, for error messages.
            peers: the other ranks of the operation, for error messages.
            start: starts the operation and returns torch's work handle.
            timeout: timeout of the operation. None: the backend's timeout. send and recv must
                pass a timeout, because gloo otherwise applies its connection timeout to them.
        """
        where = (
            f"{operation} in group {self.name}, rank {self.rank} of {self.size}, "
            f"with {_ranks(peers)}"
        )
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
                self._broken = f"an earlier {operation} timed out"
                raise TimeoutError(
                    f"{where}: no response within {self._timeout_s:.0f} s ({error})"
                ) from error
            if "connection" in reason or "broken pipe" in reason:
                raise GroupBrokenError(f"{where}: a member is gone ({error})") from error
            raise RuntimeError(f"{where}: failed ({error})") from error
        finally:
            # The caller may keep the error. The error's traceback must not keep the backend's
            # sockets and threads alive.
            del backend


def _ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _gloo(
    store: Store, rank: int, size: int, timeout: timedelta, host: str | None
) -> tuple[Backend, Abort]:
    """Create a gloo backend that is connected to all members and accepts no other connection.

    Returns:
        The backend, and a function that aborts its operations.
    """
    gloo: Any = dist.ProcessGroupGloo
    device, (own_host, port), older = open_device(host or pod_ip())
    options = gloo._Options()
    options._devices = [device]
    options._timeout = timeout
    store.set(f"listens-{rank}", f"{port} {own_host}")
    backend = gloo(store, rank, size, options)
    listening = store.multi_get([f"listens-{other}" for other in range(size)])
    connected = [f"connected-{other}" for other in range(size)]
    addresses = [address.decode().split(maxsplit=1) for address in listening]
    members = [(address, int(port)) for port, address in addresses]
    connections = connections_among(members, older)
    assert len(connections) >= size - 1, "gloo connects each pair of members over TCP"
    own_ends = connected_from(connections, members)
    store.set(f"connected-{rank}", msgspec.json.encode(own_ends).decode())
    others = [
        msgspec.json.decode(each, type=list[tuple[Address, Address]])
        for each in store.multi_get(connected)
    ]
    own = (own_host, port)
    num_rejected = reject_non_members(
        own,
        {source for each in others for source, target in each if target == own},
        older,
        is_translated=os.environ.get(TRANSLATED_ADDRESSES) == "1",
    )
    if num_rejected:
        logger.warning(
            "this rank closed %d connections to gloo at %s:%d: they are not from members of the "
            "group; check the NetworkPolicy, or set %s=1 if the network changes the addresses of "
            "pods",
            num_rejected,
            *own,
            TRANSLATED_ADDRESSES,
        )
    return backend, lambda _: end_connections(connections)


def _nccl(
    store: Store, rank: int, size: int, timeout: timedelta, host: str | None
) -> tuple[Backend, Abort]:
    """Create an NCCL backend. NCCL chooses its own address, so `host` has no effect.

    Operations run on the CUDA stream and return before they are complete. After an abort the
    results are incomplete, so the caller must discard the step. If a member is lost, NCCL's
    watchdog ends this process.

    Returns:
        The backend, and a function that aborts its operations.
    """
    if not dist.is_nccl_available():
        raise ConfigurationError(
            "InvalidConfig",
            "parallel workers on CUDA devices need NCCL, which this build of torch lacks; install "
            "a build that has it, or set device to cpu",
        )
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timeout
    backend = nccl(store, rank, size, options)
    return backend, lambda backend: backend.abort()
