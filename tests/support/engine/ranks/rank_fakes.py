"""Ranks of an expert-parallel group as threads of one process.

For the tests of the expert-parallel engine core.

The engine cores are real; models, process groups and the coordinator are fakes.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from baton_engine.distributed.group_errors import GroupBrokenError
from baton_engine.elastic.rank.waves import StepVote
from baton_engine.executor.step import ModelRunnerOutput, SchedulerOutput
from baton_engine.expert_parallel.dp_engine_core import DPEngineCore
from baton_engine.metrics.topology_stats import TopologyStats
from baton_engine.worker.experts.preparation import Preparation, PreparationState
from baton_protocol.engine_messages import EngineCoreOutput, EngineCoreRequest
from baton_protocol.options.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from baton_protocol.sampling_params import SamplingParams
from baton_protocol.topology import (
    Directive,
    ExpertLoads,
    Generation,
    RankPhase,
    StartWave,
    Status,
    TopologyMember,
)
from support.engine.engine_fakes import SparseFakeExecutor
from support.waiting import eventually

DEADLINE_S = 60.0


def config(**parallel: Any) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(path="/nowhere"),
        cache=CacheConfig(block_size=4, num_blocks=64),
        scheduler=SchedulerConfig(max_num_batched_tokens=16),
        parallel=ParallelConfig(enable_expert_parallel=True, coordinator="127.0.0.1:1", **parallel),
    )


class Meeting:
    """A fake process group. Its members exchange values until a member aborts the group."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._changed = threading.Condition()
        self._round = 0
        self._values: dict[int, Any] = {}
        self._results: list[Any] = []
        self._broken = False

    def exchange(self, rank: int, value: Any) -> list[Any]:
        with self._changed:
            number = self._round
            assert rank not in self._values, "a rank is in two exchanges"
            self._values[rank] = value
            if len(self._values) == self._size:
                self._results = [self._values[each] for each in range(self._size)]
                self._values, self._round = {}, number + 1
                self._changed.notify_all()
            if not self._changed.wait_for(lambda: self._round > number or self._broken, DEADLINE_S):
                raise TimeoutError("a rank did not join the exchange")
            if self._round == number:
                raise GroupBrokenError("a member is gone")
            return list(self._results)

    @property
    def num_waiting(self) -> int:
        """The number of ranks that wait in the exchange for other ranks."""
        with self._changed:
            return len(self._values)

    def abort(self) -> None:
        with self._changed:
            self._broken = True
            self._changed.notify_all()


class Network:
    """The process groups of the ranks, and the links between the ranks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._meetings: dict[tuple[str, str], Meeting] = {}
        #: Instance id -> rank.
        self.ranks: dict[str, Rank] = {}
        #: The number of StartWaves that will still be lost.
        self.lost_starts = 0
        self.starts: list[StartWave] = []
        #: Whether links repeat their StartWaves.
        self.repeats = True

    def meeting(self, generation: Generation, name: str) -> Meeting:
        with self._lock:
            return self._meetings.setdefault((generation.nonce, name), Meeting(generation.size))


class FakeVoteGroup:
    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting, self._rank = meeting, rank

    def exchange(self, vote: StepVote) -> list[StepVote]:
        return self._meeting.exchange(self._rank, vote)

    def abort(self) -> None:
        self._meeting.abort()

    def close(self) -> None:
        pass


class ExpertExecutor(SparseFakeExecutor):
    """Runs steps that need all ranks of the generation, as sparse layers do."""

    network: Network

    def __init__(self, config: EngineConfig, instance_id: str, wakeup: Callable[[], None]) -> None:
        super().__init__(config, instance_id, wakeup)
        self.generation: Generation | None = None
        self._prepared: Generation | None = None
        self.preparation_fails = ""
        self.preparation_held = False
        self.breaks_at_step = -1
        self.num_wave_steps = 0
        self.step_s = 0.002  # so that tests can act before a request of a hundred tokens ends

    def _run(self, step: SchedulerOutput) -> ModelRunnerOutput:
        if step.wave_tokens:
            self.num_wave_steps += 1
            rank = self.generation.rank_of(self.instance_id)
            assert step.wave_tokens[rank] == step.total_num_scheduled_tokens
            experts = self.network.meeting(self.generation, "experts")
            try:
                if self.num_wave_steps == self.breaks_at_step:
                    experts.abort()
                seen = experts.exchange(rank, step.wave_tokens)
            except GroupBrokenError:
                self.runner.fail_to_run(step)
                raise
            assert seen == [step.wave_tokens] * len(seen), "ranks run different steps"
        else:
            assert not step.num_scheduled_tokens, "a step with tokens runs outside a wave"
        return super()._run(step)

    def interrupt(self, nonce: str = "") -> None:
        generation = self.generation
        if generation is not None and nonce in ("", generation.nonce):
            self.network.meeting(generation, "experts").abort()

    def collective_rpc(
        self, method: str, args: tuple[Any, ...] = (), *, timeout_s: float | None = None
    ) -> list[Any]:
        match method:
            case "prepare_generation":
                assert args[0].rank_of(self.instance_id) is not None
                self._prepared = args[0]
            case "preparation":
                return [self._preparation()]
            case "commit_generation":
                assert self._prepared.nonce == args[0]
                self.generation, self._prepared = self._prepared, None
            case "drop_generation":
                if self._prepared is not None and self._prepared.nonce == args[0]:
                    self._prepared = None
            case "leave_generation":
                self.generation = self._prepared = None
            case "expert_loads":
                return [ExpertLoads(((1, 2, 3, 4), (4, 3, 2, 1)))]
            case _:
                return super().collective_rpc(method, args, timeout_s=timeout_s)
        return [None]

    def _preparation(self) -> Preparation:
        if self._prepared is None:
            return Preparation()
        if self.preparation_fails:
            return Preparation(
                self._prepared.nonce, PreparationState.FAILED, self.preparation_fails
            )
        state = PreparationState.PREPARING if self.preparation_held else PreparationState.PREPARED
        return Preparation(self._prepared.nonce, state)


class Rank:
    """A rank: its engine core in a thread, with the loop of DPEngineCoreProc, and its link."""

    def __init__(self, network: Network, name: str) -> None:
        self.network, self.name = network, name
        self.member = TopologyMember(name, f"instance-{name}", "127.0.0.1", 1, 2, 3)
        network.ranks[self.member.instance_id] = self
        self.inputs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        engine_config = config()
        self.executor = ExpertExecutor(engine_config, self.member.instance_id, self.wake)
        self.executor.network = network
        self.core = DPEngineCore(
            engine_config,
            self.executor,
            member=self.member,
            wave_sender=self,
            join=self._join,
            wakeup=self.wake,
        )
        self.join_fails = ""
        #: Stops the engine loop while it is set.
        self.frozen = threading.Event()
        self.outputs: dict[str, list[EngineCoreOutput]] = defaultdict(list)
        self.error: Exception | None = None
        self._peers: Sequence[TopologyMember] = ()
        self._start: StartWave | None = None
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._repeater = threading.Thread(target=self._repeat, name=f"{name}-link", daemon=True)
        self._thread.start()
        self._repeater.start()

    # The engine loop

    def wake(self) -> None:
        self.inputs.put(lambda: None)

    def _run(self) -> None:
        busy = False
        try:
            while not self._stopped:
                self._take_inputs(busy)
                self.core.advance()
                busy = False
                if self.core.has_requests:
                    self._keep(self.core.step())
                    busy = self.core.made_progress
                self._keep(self.core.take_outputs())
        except Exception as error:
            self.error = error

    def _take_inputs(self, busy: bool) -> None:
        try:
            take = self.inputs.get_nowait() if busy else self.inputs.get(timeout=0.02)
            while True:
                take()
                take = self.inputs.get_nowait()
        except queue.Empty:
            pass
        while self.frozen.is_set() and not self._stopped:
            time.sleep(0.005)

    def _keep(self, outputs: list[EngineCoreOutput]) -> None:
        for output in outputs:
            self.outputs[output.request_id].append(output)

    def _join(self, generation: Generation, rank: int) -> FakeVoteGroup:
        if self.join_fails:
            raise TimeoutError(self.join_fails)
        self.network.meeting(generation, "join").exchange(rank, self.name)
        return FakeVoteGroup(self.network.meeting(generation, "votes"), rank)

    # The link

    def set_peers(self, members: Sequence[TopologyMember]) -> None:
        self._peers, self._start = members, None

    def start_wave(self, start: StartWave) -> None:
        self._start = start
        self._send(start)

    def end_start(self) -> None:
        self._start = None

    def _send(self, start: StartWave) -> None:
        self.network.starts.append(start)
        if self.network.lost_starts > 0:
            self.network.lost_starts -= 1
            return
        for member in self._peers:
            peer = self.network.ranks[member.instance_id]
            peer.inputs.put(lambda peer=peer: peer.core.on_start_wave(start))  # type: ignore[misc]

    def _repeat(self) -> None:
        while not self._stopped:
            time.sleep(0.02)
            start = self._start
            if start is not None and self.network.repeats and not self.frozen.is_set():
                self._send(start)

    # For tests

    def receive_directive(
        self, target: Generation | None = None, *, commit: bool = False, dismissed: bool = False
    ) -> None:
        """Process a directive as if the coordinator had sent it."""
        directive = Directive(target, commit, dismissed)
        self.core.interrupt(directive)
        self.inputs.put(lambda: self.core.on_directive(directive))

    def add(self, request_id: str, prompt: list[int], max_tokens: int = 20, **fields: Any) -> None:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        request = EngineCoreRequest(request_id, prompt, params, **fields)

        def take() -> None:
            refusal = self.core.add_request(request)
            if refusal is not None:
                self.outputs[request_id].append(refusal)

        self.inputs.put(take)

    def tokens(self, request_id: str) -> list[int]:
        return [
            token for output in list(self.outputs[request_id]) for token in output.new_token_ids
        ]

    def ended(self, request_id: str) -> EngineCoreOutput | None:
        outputs = self.outputs[request_id]
        return outputs[-1] if outputs and outputs[-1].finished else None

    def text(self, request_id: str) -> list[int]:
        """Wait for the end of a request, and return all tokens of the response."""
        last = self.until(lambda: self.ended(request_id), f"the end of {request_id}")
        assert not last.error, last.error
        return self.tokens(request_id)

    def until(self, probe: Callable[[], Any], what: str) -> Any:
        def checked() -> Any:
            if self.error is not None:
                raise RuntimeError(f"{self.name} has failed") from self.error
            return probe()

        return eventually(checked, timeout_s=DEADLINE_S, what=f"{self.name}: {what}", every_s=0.005)

    def status(self) -> Status:
        return self.core.status()

    def topology(self) -> TopologyStats:
        topology = self.core.get_stats().topology
        assert topology is not None
        return topology

    def serves(self, generation: Generation) -> bool:
        status = self.status()
        return status.phase is RankPhase.SERVING and status.generation is generation

    def wait_phase(self, phase: RankPhase) -> None:
        self.until(lambda: self.status().phase is phase, phase.name)

    def wait_prepared(self, target: Generation) -> None:
        self.until(lambda: self.status().prepared == target.nonce, f"{target.nonce} prepared")

    def wait_serving(self, target: Generation) -> None:
        self.until(lambda: self.serves(target), f"{target.nonce} committed")

    def wait_wave_end(self) -> None:
        self.until(lambda: not self.topology().wave_running, "the end of the wave")

    def stop(self) -> None:
        self._stopped = True
        self.core.interrupt(Directive(dismissed=True))
        self._thread.join(DEADLINE_S)
        self.executor.shutdown()


def generation(
    number: int, ranks: Sequence[Rank], *, urgent: bool = False, nonce: str = ""
) -> Generation:
    placement = (tuple((index,) for index in range(len(ranks))),) * 2
    members = tuple(rank.member for rank in ranks)
    return Generation(
        number,
        nonce or f"nonce-{number}",
        members,
        placement,
        "127.0.0.1",
        3,
        f"op-{number}",
        urgent,
    )


def prepare(target: Generation, ranks: Sequence[Rank]) -> None:
    """Send `target` to `ranks`, and wait until they are prepared."""
    for rank in ranks:
        rank.receive_directive(target)
    for rank in ranks:
        rank.wait_prepared(target)


def commit(target: Generation, directed: Sequence[Rank], *, serving: Sequence[Rank]) -> None:
    """Act as the coordinator: send `target` to the ranks `directed`, then commit `target`.

    Before the commit, wait until all ranks in `serving` are prepared. After the commit, wait until
    they serve `target`.
    """
    for rank in directed:
        rank.receive_directive(target)
    for rank in serving:
        rank.wait_prepared(target)
    for rank in directed:
        rank.receive_directive(target, commit=True)
    for rank in serving:
        rank.wait_serving(target)
