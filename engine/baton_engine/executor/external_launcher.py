"""The executor for torchrun: every rank is a whole engine with one worker.

For offline use. With identical requests in identical order, all schedulers make the same decisions,
so no command is broadcast. The ranks exchange only two things: the tokens that the last pipeline
stage sampled, and the results of `collective_rpc`. Both are encoded as msgpack and not pickled,
because ranks may be in different pods, and unpickling executes code.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import msgspec
import torch
from torch._C._distributed_c10d import TCPStore

from baton_engine.distributed.group import Group, LoneGroup
from baton_engine.distributed.process_group import create_group
from baton_engine.distributed.store.handshake import store_secret
from baton_engine.distributed.store.socket_store import connect_store
from baton_engine.distributed.store.store_server import StoreServer, open_store
from baton_engine.distributed.store.wire import StoreAddress
from baton_engine.executor.base import ModelInfo, WorkerError
from baton_engine.executor.commands import CommandFailure
from baton_engine.executor.startup import (
    JOIN_TIMEOUT_S,
    initialize_workers,
    load_worker_class,
    output_rank,
    refuse_expert_parallel,
    share_threads,
)
from baton_engine.executor.step import GrammarOutput, ModelRunnerOutput, PendingOutput
from baton_engine.executor.uniproc import UniProcExecutor
from baton_engine.models.errors import ConfigurationError
from baton_protocol.options.config import EngineConfig, KVRole
from baton_protocol.service_key import ServiceKey, ServiceKeyError

#: Maximum number of executors that one process creates. Each restart by torchrun gets a range of
#: this many generation numbers, so that no two restarts use the same generation.
MAX_EXECUTORS = 2**20
_executor_numbers = itertools.count()


class _Result(msgspec.Struct):
    """The result or the error of a call on one rank."""

    value: Any = None
    #: Empty if the call succeeded.
    error: str = ""
    #: Reason of a ConfigurationError.
    reason: str = ""


class ExternalLauncherExecutor(UniProcExecutor):
    """Runs the worker of one rank in this process. torchrun starts one process per rank."""

    def __init__(self, config: EngineConfig, instance_id: str, wakeup: Callable[[], None]) -> None:
        super().__init__(config, instance_id, wakeup)
        # With several steps in flight, decisions would depend on when steps end, and would differ
        # between ranks.
        self.max_concurrent_batches = 1
        self._rank = _environment("RANK")
        self._world_size = config.parallel.world_size
        self._output_rank = output_rank(config)
        #: The group of all ranks, for everything except the model's tensors. Only the worker's
        #: thread uses it, in the order of the steps.
        self._control: Group = LoneGroup()
        self._store: StoreServer | None = None  # open on rank 0 only

    def initialize(self) -> ModelInfo:
        refuse_expert_parallel(self.config, "external_launcher")
        if (launched := _environment("WORLD_SIZE")) != self._world_size:
            raise ConfigurationError(
                "InvalidConfig",
                f"torchrun started {launched} ranks, but tensor_parallel_size x "
                f"pipeline_parallel_size is {self._world_size}; make them equal",
            )
        if self._world_size > 1 and self.config.kv_transfer.role is not KVRole.NONE:
            # Transfers end at different times on different ranks, so the decisions of the ranks'
            # schedulers would differ.
            raise ConfigurationError(
                "KVTransferInvalid",
                f"executor external_launcher has {self._world_size} ranks and kv_transfer.role is "
                f"{self.config.kv_transfer.role.value}, but its ranks cannot move KV blocks "
                "between engines; set parallel.executor_class to multiproc, or "
                "kv_transfer.role to none",
            )
        config = share_threads(
            self.config, int(os.environ.get("LOCAL_WORLD_SIZE", self._world_size))
        )
        # `generation` must be unique in the store of torchrun's agent, which outlives executors.
        # Every rank creates its executors in the same order.
        restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        generation = restarts * MAX_EXECUTORS + next(_executor_numbers)
        try:
            secret = store_secret(ServiceKey.load(config.service_key_file))
        except ServiceKeyError as error:
            raise ConfigurationError("ServiceKeyInvalid", str(error)) from None
        address = self._find_store(generation, secret)
        self._control = create_group(
            "control",
            self._rank,
            self._world_size,
            connect_store(address, JOIN_TIMEOUT_S, secret),
            generation,
            torch.device("cpu"),
            config.parallel.step_timeout_s,
        )
        worker_class = load_worker_class(config)
        self._worker = self._thread.submit(
            worker_class, config, self.instance_id, self._rank
        ).result()
        if self._world_size > 1:
            self.collective_rpc("join_groups", (address, generation, None, secret))
        initialize_workers(config, self.collective_rpc, wakeup_args=(self.wakeup,))
        return self._worker.model_info()

    def collective_rpc(
        self, method: str, args: tuple[Any, ...] = (), *, timeout_s: float | None = None
    ) -> list[Any]:
        """Call a method of every rank's worker. Every rank must make the same call.

        Results of other ranks are decoded from msgpack: a tuple becomes a list, and a
        dataclass becomes a dict.
        """
        future = self._thread.submit(self._call_everywhere, method, args)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            if future.done():  # ended after the timeout, or the exchange timed out
                return future.result()
            raise TimeoutError(
                f"{method} was not answered by all ranks within {timeout_s} s"
            ) from None

    def shutdown(self) -> None:
        super().shutdown()
        if self.is_forked_copy:
            return
        self._control.close()
        if self._store is not None:
            self._store.close()

    def _find_store(self, generation: int, secret: bytes) -> StoreAddress:
        """Return the address of the rendezvous store of all ranks. Rank 0 opens this store.

        The address is MASTER_ADDR:MASTER_PORT, unless the store of torchrun's agent uses this
        address. Rank 0 then opens the rendezvous store on a free port of its host, and publishes
        the new address in the agent's store.

        Raises:
            TimeoutError: the agent's store does not answer, or rank 0 publishes no address.
            OSError: rank 0 cannot bind the address of the store.
        """
        master = StoreAddress(os.environ["MASTER_ADDR"], _environment("MASTER_PORT"))
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            if self._rank == 0:
                self._store = open_store(master.host, port=master.port, secret=secret)
            return master
        key = f"baton-store-{generation}"
        try:
            agent = TCPStore(
                *master, wait_for_workers=False, timeout=timedelta(seconds=JOIN_TIMEOUT_S)
            )
            if self._rank == 0:
                self._store = open_store(secret=secret)
                agent.set(key, f"{self._store.address.port} {self._store.address.host}")
            port, host = agent.get(key).decode().split()
        except RuntimeError as error:  # DistNetworkError and DistStoreError are RuntimeErrors
            raise TimeoutError(
                f"torchrun's store at {master.host}:{master.port} has no address of rank 0 "
                f"({error}); see the log of rank 0, and check that this host reaches it"
            ) from error
        return StoreAddress(host, int(port))

    # In the worker's thread

    def _sample(self, grammar: GrammarOutput | None) -> ModelRunnerOutput | PendingOutput:
        """Sample the tokens of the step that the worker ran last, and return the results.

        With several pipeline stages, every rank returns the results of the output rank. With one
        stage, all ranks sample the same tokens, so each rank returns its own results.
        """
        output = super()._sample(grammar)
        if self.config.parallel.pipeline_parallel_size == 1:
            return output
        outputs = self._gather(msgspec.msgpack.encode(output))
        return msgspec.msgpack.decode(outputs[self._output_rank], type=ModelRunnerOutput)

    def _call_everywhere(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        own = None
        try:
            own = getattr(self._worker, method)(*args)
            encoded = msgspec.msgpack.encode(_Result(own))
        except ConfigurationError as error:
            encoded = msgspec.msgpack.encode(_Result(error=error.message, reason=error.reason))
        except Exception as error:
            text = str(CommandFailure.of(error, self._rank).exception(method))
            encoded = msgspec.msgpack.encode(_Result(error=text))
        results = [msgspec.msgpack.decode(part, type=_Result) for part in self._gather(encoded)]
        for result in results:
            if result.reason:
                raise ConfigurationError(result.reason, result.error)
            if result.error:
                raise WorkerError(result.error)
        return [own if rank == self._rank else result.value for rank, result in enumerate(results)]

    def _gather(self, data: bytes) -> list[bytes]:
        """Exchange data with all ranks. Return the `data` argument of each rank, in rank order."""
        lengths = self._control.all_gather(torch.tensor([len(data)])).tolist()
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        rows = self._control.all_gather(padded).view(len(lengths), -1)
        return [bytes(row[:length].numpy()) for row, length in zip(rows, lengths, strict=True)]


def _environment(name: str) -> int:
    """Return an integer from an environment variable that torchrun sets.

    Raises:
        ConfigurationError: the variable is missing or not an integer.
    """
    try:
        return int(os.environ[name])
    except (KeyError, ValueError):
        raise ConfigurationError(
            "InvalidConfig",
            f"executor external_launcher needs {name} in the environment, as an integer; "
            "start the program with torchrun --nproc-per-node=N",
        ) from None
