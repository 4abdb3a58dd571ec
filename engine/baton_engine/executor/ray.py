"""The executor of Ray actors: one actor per rank, on any nodes of the Ray cluster.

A placement group reserves the resources of all actors at once, on as few nodes as possible. Ranks
of one node are consecutive, and the node of this process comes first.

Needs the extra `ray`. If the program has called `ray.init` or RAY_ADDRESS is set, the executor uses
that Ray cluster. Otherwise the executor starts a local Ray cluster, without dashboard and usage
statistics, and stops the cluster at `shutdown`. Ray leaves the logs of a local cluster in /tmp/ray.
If token authentication is on and there is no token, Ray also creates ~/.ray/auth_token.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import secrets
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

from baton_engine.distributed.store.store_server import StoreServer, open_store
from baton_engine.executor.base import ModelInfo, WorkerDiedError, WorkerError
from baton_engine.executor.commands import CommandFailure
from baton_engine.executor.futures import reject, resolve, wait_for_answers
from baton_engine.executor.remote_executor import RemoteExecutor
from baton_engine.executor.startup import (
    JOIN_TIMEOUT_S,
    initialize_workers,
    load_worker_class,
    output_rank,
    refuse_expert_parallel,
    share_threads,
)
from baton_engine.executor.step import (
    GrammarOutput,
    ModelRunnerOutput,
    PendingOutput,
    SchedulerOutput,
)
from baton_engine.models.errors import ConfigurationError
from baton_kv_transfer.connector import ConnectorStats
from baton_protocol.options.config import EngineConfig, KVRole

logger = logging.getLogger(__name__)

#: Concurrency group of `_RankActor.hold`. All other calls run one after the other.
WATCH = "watch"
SHUTDOWN_TIMEOUT_S = 10.0


class RayExecutor(RemoteExecutor):
    """Runs one Ray actor per rank."""

    #: Maximum wait until the cluster has room for all workers.
    reserve_timeout_s = JOIN_TIMEOUT_S
    #: Maximum wait for workers to end by themselves. Workers that still run are then killed.
    shutdown_timeout_s = SHUTDOWN_TIMEOUT_S

    def __init__(self, config: EngineConfig, instance_id: str, wakeup: Callable[[], None]) -> None:
        super().__init__(config, instance_id, wakeup)
        self._output_rank = output_rank(config)
        self._ray = _import_ray()
        #: The placement group. It has one bundle per worker.
        self._bundles: Any = None
        self._actors: list[Any] = []
        self._all_up = False
        self._owns_ray = False
        self._store: StoreServer | None = None
        #: Futures that fail when the executor fails, by number. Guarded by `_lock`, because Ray's
        #: threads report answers and deaths.
        self._pending: dict[int, Future[Any]] = {}
        self._tickets = itertools.count()

    def initialize(self) -> ModelInfo:
        refuse_expert_parallel(self.config, "ray")
        if self.config.kv_transfer.role is not KVRole.NONE:
            raise ConfigurationError(
                "KVTransferInvalid",
                f"kv_transfer.role is {self.config.kv_transfer.role.value}, but executor ray "
                "cannot move KV blocks between engines; set parallel.executor_class to "
                "multiproc, or kv_transfer.role to none",
            )
        if not self._ray.is_initialized():
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            self._ray.init(include_dashboard=False)
            self._owns_ray = True
        needs = {"CPU": 1} if self.config.device == "cpu" else {"CPU": 1, "GPU": 1}
        self._reserve(needs)
        actor_class = self._ray.remote(
            num_cpus=1,
            num_gpus=needs.get("GPU", 0),
            max_restarts=0,
            concurrency_groups={WATCH: 1},
        )(_RankActor)
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        self._actors = [
            actor_class.options(
                scheduling_strategy=strategy(self._bundles, placement_group_bundle_index=bundle)
            ).remote(self.config, self.instance_id, rank)
            for rank, bundle in enumerate(self._bundles_in_rank_order())
        ]
        for rank, actor in enumerate(self._actors):
            self._on_result(
                actor.hold.options(concurrency_group=WATCH).remote(), rank, Future(), lambda _: None
            )
        places = self._call_actors("place", (), JOIN_TIMEOUT_S)
        self._call_actors("create_worker", (places,), JOIN_TIMEOUT_S)
        self._all_up = True
        if self._world_size > 1:
            secret = secrets.token_bytes()
            self._store = open_store(self._ray.util.get_node_ip_address(), secret=secret)
            self._call_actors("join_groups", (self._store.address, secret), JOIN_TIMEOUT_S)
        return initialize_workers(self.config, self.collective_rpc)

    def execute_model(self, step: SchedulerOutput) -> None:
        shared = self._ray.put(step)
        for actor in self._actors:
            actor.execute_model.remote(shared)

    def sample_tokens(self, grammar: GrammarOutput | None) -> Future[ModelRunnerOutput]:
        future: Future[ModelRunnerOutput] = Future()
        if not self._register(future):
            return future

        def take(output: ModelRunnerOutput | None) -> None:
            if output is not None:
                resolve(future, output)

        for rank, actor in enumerate(self._actors):
            ref = actor.sample_tokens.remote(grammar, rank == self._output_rank)
            self._on_result(ref, rank, future, take, step=True)
        return future

    def collective_rpc(
        self, method: str, args: tuple[Any, ...] = (), *, timeout_s: float | None = None
    ) -> list[Any]:
        return self._call_actors("call", (method, args), timeout_s)

    def connector_stats(self) -> ConnectorStats | None:
        return None

    def shutdown(self) -> None:
        if self.is_forked_copy:
            return
        with self._lock:
            if self._stopping:
                return
            self._stopping = True
            orderly = self._failure is None and self._all_up
        if orderly:
            with contextlib.suppress(TimeoutError, WorkerError, WorkerDiedError):
                self._call_actors("call", ("shutdown", ()), self.shutdown_timeout_s)
        for actor in self._actors:
            self._ray.kill(actor)
        if self._bundles is not None:
            self._ray.util.remove_placement_group(self._bundles)
        self._fail(WorkerDiedError("the executor was shut down"), died=True)
        if self._store is not None:
            self._store.close()
        if self._owns_ray:
            self._ray.shutdown()

    def _reserve(self, needs: dict[str, int]) -> None:
        """Reserve the resources of all workers, or none of them.

        Args:
            needs: resources of one worker.

        Raises:
            TimeoutError: the cluster has no room for all workers.
        """
        self._bundles = self._ray.util.placement_group([needs] * self._world_size, strategy="PACK")
        if self._bundles.wait(self.reserve_timeout_s):
            return
        each = " and ".join(f"{number} {name}" for name, number in needs.items())
        total, free = self._ray.cluster_resources(), self._ray.available_resources()
        have = ", ".join(
            f"{total.get(name, 0):g} {name} ({free.get(name, 0):g} free)" for name in needs
        )
        raise TimeoutError(
            f"the Ray cluster had no room for {self._world_size} workers within "
            f"{self.reserve_timeout_s:g} s. Each worker needs {each} of one node, and the cluster "
            f"has {have}. Add nodes or end other jobs (see `ray status`), or lower "
            "parallel.tensor_parallel_size or pipeline_parallel_size. Workers need no GPU if "
            "device is cpu"
        )

    def _bundles_in_rank_order(self) -> list[int]:
        """Return the index of each rank's bundle in the placement group, grouped by node.

        The bundles on this process's node come first. Tensor-parallel ranks are consecutive, so
        most of their traffic stays within a node.
        """
        nodes = self._ray.util.placement_group_table(self._bundles)["bundles_to_node_id"]
        own = self._ray.get_runtime_context().get_node_id()
        return sorted(nodes, key=lambda bundle: (nodes[bundle] != own, nodes[bundle], bundle))

    def _call_actors(
        self, actor_method: str, args: tuple[Any, ...], timeout_s: float | None
    ) -> list[Any]:
        """Call a method of every actor. Return and raise what `collective_rpc` specifies."""
        results: dict[int, Any] = {}
        future: Future[list[Any]] = Future()
        if not self._register(future):
            return future.result()
        what = str(args[0]) if actor_method == "call" else actor_method

        def take(result: Any, rank: int) -> None:
            with self._lock:
                results[rank] = result
                complete = len(results) == self._world_size
            if complete:
                resolve(future, [results[rank] for rank in range(self._world_size)])

        for rank, actor in enumerate(self._actors):
            ref = getattr(actor, actor_method).remote(*args)
            self._on_result(ref, rank, future, functools.partial(take, rank=rank), doing=what)
        return wait_for_answers(future, timeout_s, what, self._world_size, results)

    def _register(self, future: Future[Any]) -> bool:
        """Register a future that fails when the executor fails.

        Returns:
            True if registered. False if the executor has already failed: `future` then raises the
            executor's error.
        """
        ticket = next(self._tickets)
        with self._lock:
            failure = self._failure
            if failure is None:
                self._pending[ticket] = future
        if failure is not None:
            reject(future, failure)
            return False
        future.add_done_callback(lambda _: self._pending.pop(ticket, None))
        return True

    def _on_result(
        self,
        ref: Any,
        rank: int,
        future: Future[Any],
        take: Callable[[Any], None],
        *,
        doing: str = "a step",
        step: bool = False,
    ) -> None:
        """Pass the result of an actor's call to `take` when the call ends.

        If the call fails, `future` fails. If a step fails or the actor dies, all pending futures
        fail.

        Args:
            ref: Ray's reference to the result.
            rank: rank of the actor.
            future: future that fails if the call fails.
            take: called with the result, in a thread of Ray.
            doing: the operation, for the error message.
            step: whether the call is part of a step.
        """

        def done(answer: Future[Any]) -> None:
            error = answer.exception()
            if error is not None:  # Ray's own error; actors return a CommandFailure
                self._fail(
                    WorkerDiedError(
                        f"the Ray actor of worker {rank} has ended: {_one_line(error)}"
                    ),
                    died=True,
                )
                return
            result = answer.result()
            if not isinstance(result, CommandFailure):
                take(result)
            elif step:
                self._fail(result.exception(doing), died=False)
            else:
                reject(future, result.exception(doing))

        ref.future().add_done_callback(done)

    def _take_pending(self, died: bool) -> list[Future[Any]]:
        return list(self._pending.values())


class _Place(NamedTuple):
    """The node and the GPUs of a Ray actor."""

    node_id: str
    #: GPUs that Ray has assigned to the actor. Empty on a CPU.
    gpu_ids: list[str]


class _RankActor:
    """The Ray actor of one rank.

    Methods return an exception as a CommandFailure, because Ray would wrap a raised exception.
    """

    def __init__(self, config: EngineConfig, instance_id: str, rank: int) -> None:
        self._config = config
        self._instance_id = instance_id
        self._rank = rank
        self._failure: CommandFailure | None = None
        self._worker: Any = None

    def hold(self) -> None:
        """Block until the actor dies, so that Ray reports the death as a failure of this call."""
        threading.Event().wait()

    def place(self) -> _Place:
        context = _import_ray().get_runtime_context()
        return _Place(context.get_node_id(), context.get_accelerator_ids()["GPU"])

    def create_worker(self, places: list[_Place]) -> CommandFailure | None:
        """Create the worker of this rank.

        The engine's workers on one node share the cores of the node. Each worker sees the GPUs of
        all workers on its node, so that NCCL can copy between the GPUs.

        Args:
            places: the places of all ranks.

        Returns:
            The failure, or None if the worker was created.
        """
        own = places[self._rank]
        local = [rank for rank, place in enumerate(places) if place.node_id == own.node_id]
        if own.gpu_ids:
            gpu_ids = [gpu for rank in local for gpu in places[rank].gpu_ids]
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpu_ids)
        os.environ["LOCAL_RANK"] = str(local.index(self._rank))  # selects the GPU
        try:
            config = share_threads(self._config, len(local))
            self._worker = load_worker_class(config)(config, self._instance_id, self._rank)
        except Exception as error:
            return CommandFailure.of(error, self._rank)
        return None

    def join_groups(self, store_address: tuple[str, int], secret: bytes) -> Any:
        address = _import_ray().util.get_node_ip_address()
        return self.call("join_groups", (store_address, 0, address, secret))

    def call(self, method: str, args: tuple[Any, ...]) -> Any:
        try:
            if method == "open_connector":
                args = (lambda: None,)  # no connector can wake the engine
            return getattr(self._worker, method)(*args)
        except Exception as error:
            return CommandFailure.of(error, self._rank)

    def execute_model(self, step: SchedulerOutput) -> None:
        try:
            if self._failure is None:
                self._worker.execute_model(step)
        except Exception as error:
            self._failure = CommandFailure.of(error, self._rank)

    def sample_tokens(self, grammar: GrammarOutput | None, is_output: bool) -> Any:
        try:
            if self._failure is None:
                output = self._worker.sample_tokens(grammar)
                if not is_output:
                    return None
                return output.result() if isinstance(output, PendingOutput) else output
        except Exception as error:
            self._failure = CommandFailure.of(error, self._rank)
        return self._failure


def _one_line(error: BaseException) -> str:
    """Return the type and the message of an exception on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _import_ray() -> Any:
    try:
        import ray
    except ImportError:
        raise ConfigurationError(
            "InvalidConfig",
            "executor ray needs the package ray; install it with: pip install 'baton[ray]'",
        ) from None
    return ray
