"""Process groups over torch's gloo and NCCL backends, each built directly on a store: there is no default group.

A group lives in its generation's part of the store, so that the ranks of a new topology meet without tearing down the old one,
and a straggler of an old generation can never join a new group.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from baton_engine.distributed.group import Group, LoneGroup, ParallelContext
from baton_engine.distributed.shared_memory_group import over_shared_memory
from baton_engine.protocol.config import ParallelConfig, pod_ip

logger = logging.getLogger(__name__)

Backend = Any
"""ProcessGroupGloo or ProcessGroupNCCL: torch's stubs do not know their methods."""


class StoreAddress(NamedTuple):
    host: str
    port: int


def open_store(host: str | None = None, *, port: int = 0, timeout_s: float = 60.0) -> tuple[TCPStore, StoreAddress]:
    """Starts the store in which ranks meet. It lives as long as the returned object.

    Args:
        host: the one address to listen on; None: the pod's. (Left to itself, torch listens on all of them.)
        port: 0: any free one.
    """
    host = host or pod_ip()
    listener = socket.create_server((host, port), backlog=128)
    port = listener.getsockname()[1]
    store = TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener.detach(),  # the store owns and closes it
    )
    return store, StoreAddress(host, port)


def connect_store(address: StoreAddress, timeout_s: float) -> Store:
    """Raises TimeoutError if no store answers there in time."""
    try:
        return TCPStore(
            address.host, address.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
        )
    except RuntimeError as error:  # DistNetworkError and DistStoreError are RuntimeErrors
        raise TimeoutError(f"no store answers at {address.host}:{address.port} within {timeout_s:.0f} s") from error


def create_group(
    name: str,
    rank: int,
    size: int,
    store: Store,
    generation: int,
    device: torch.device,
    timeout_s: float,
    *,
    host: str | None = None,
) -> Group:
    """Joins a group; returns once all members have.

    Args:
        name: the same for all members, unique within the generation.
        store: reachable by all members.
        device: what tensors will be on. cpu: gloo, and shared memory if all members are on one host; cuda: NCCL.
        timeout_s: of every operation, and of joining.
        host: this rank's own address, for gloo; None: the pod's.

    Raises:
        TimeoutError: not all members came.
    """
    if size == 1:
        return LoneGroup()
    timeout = timedelta(seconds=timeout_s)
    part = PrefixStore(f"generation-{generation}/{name}", store)
    part.set_timeout(timeout)
    try:
        backend = (
            _gloo(part, rank, size, timeout, host or pod_ip())
            if device.type == "cpu"
            else _nccl(part, rank, size, timeout)
        )
        group = TorchGroup(name, rank, size, backend, timeout_s)
        # Connections are made lazily: a missing member shows here, not later.
        group.all_reduce(torch.zeros(1, device=device))
        joined = over_shared_memory(group, name, part, timeout_s) if device.type == "cpu" else group
    except TimeoutError:
        raise
    except RuntimeError as error:
        raise TimeoutError(
            f"group {name} of generation {generation}: rank {rank} waited {timeout_s:.0f} s for the other "
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
) -> ParallelContext:
    """Joins the groups of global rank `rank`. Collective over all ranks of `parallel`; arguments as in `create_group`.

    Raises:
        TimeoutError: the store does not answer, or not all ranks came.
    """
    if parallel.world_size == 1:
        return ParallelContext()
    store = connect_store(store_address, timeout_s)
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

    def __init__(self, name: str, rank: int, size: int, backend: Backend, timeout_s: float) -> None:
        self.name = name
        self.rank = rank
        self.size = size
        self._backend: Backend | None = backend
        self._timeout_s = timeout_s

    def all_reduce(self, tensor: Tensor) -> Tensor:
        dense = tensor.contiguous()
        self._run("all_reduce", self._others, lambda backend: backend.allreduce([dense]))
        if dense is not tensor:
            tensor.copy_(dense)
        return tensor

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        dense = tensor.contiguous()
        parts = dense.new_empty(self.size * dense.numel())
        self._run("all_gather", self._others, lambda backend: backend._allgather_base(parts, dense.view(-1)))
        return torch.cat(parts.view(self.size, *dense.shape).unbind(0), dim)

    def send(self, tensor: Tensor, target: int) -> None:
        dense = tensor.contiguous()
        self._run("send", [target], lambda backend: backend.send([dense], target, 0))

    def recv(self, tensor: Tensor, source: int) -> Tensor:
        dense = tensor if tensor.is_contiguous() else torch.empty_like(tensor, memory_format=torch.contiguous_format)
        self._run("recv", [source], lambda backend: backend.recv([dense], source, 0))
        if dense is not tensor:
            tensor.copy_(dense)
        return tensor

    def close(self) -> None:
        backend, self._backend = self._backend, None
        if backend is not None:
            backend.shutdown()

    @property
    def _others(self) -> Sequence[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    def _run(self, operation: str, peers: Sequence[int], start: Callable[[Backend], Any]) -> None:
        """Starts an operation and waits for it. Its errors get to say who and where."""
        where = f"{operation} in group {self.name}, rank {self.rank} of {self.size}, with {_ranks(peers)}"
        if self._backend is None:
            raise RuntimeError(f"{where}: the group is closed")
        try:
            start(self._backend).wait()
        except RuntimeError as error:
            if "timed out" in str(error).lower() or "timeout" in str(error).lower():
                raise TimeoutError(f"{where}: no answer within {self._timeout_s:.0f} s ({error})") from error
            problem = "a member is gone" if "connection" in str(error).lower() else "failed"
            raise RuntimeError(f"{where}: {problem} ({error})") from error


def _ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _gloo(store: Store, rank: int, size: int, timeout: timedelta, host: str) -> Backend:
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=host)]
    options._timeout = timeout
    return gloo(store, rank, size, options)


def _nccl(store: Store, rank: int, size: int, timeout: timedelta) -> Backend:
    """Its operations are ordered by the CUDA stream; a lost member ends this process through NCCL's watchdog."""
    if not dist.is_nccl_available():
        raise RuntimeError(
            "this build of torch has no NCCL, which parallel workers on CUDA devices need; install one that has"
        )
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timeout
    return nccl(store, rank, size, options)
