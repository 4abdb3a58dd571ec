"""A deterministic model and a connector without a network, for tests of everything above them.

The next token is a hash of all tokens so far, so any mistake in scheduling, resuming or offsets changes the text. The fake
keeps a shadow KV memory, checks that each position it reads was written with the right tokens, and so notices wrong blocks.
"""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from baton_engine.core.step import GrammarOutput, ModelRunnerOutput, SchedulerOutput
from baton_engine.executor.base import Executor, ModelInfo
from baton_engine.protocol.config import EngineConfig
from baton_kv_transfer.connector import BlockLoad, ConnectorOutput, ConnectorStats, LoadResult

VOCAB_SIZE = 1000
EOS = 0


def next_token(token_ids: Sequence[int]) -> int:
    return zlib.crc32(repr(list(token_ids)).encode()) % VOCAB_SIZE


def continuation(prompt: Sequence[int], num_tokens: int, *, ignore_eos: bool = False) -> list[int]:
    """What the fake model says after `prompt`."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens))
        if tokens[-1] == EOS and not ignore_eos:
            break
    return tokens[len(prompt) :]


@dataclass
class _Sequence:
    token_ids: list[int]
    block_ids: list[int]


@dataclass
class FakeRunner:
    block_size: int
    max_num_batched_tokens: int
    memory: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    """(block, offset) -> all tokens up to the one whose KV is there."""
    sequences: dict[str, _Sequence] = field(default_factory=dict)

    def write(self, block_ids: Sequence[int], token_ids: Sequence[int], start: int, end: int) -> None:
        for position in range(start, end):
            slot = (block_ids[position // self.block_size], position % self.block_size)
            self.memory[slot] = list(token_ids[: position + 1])

    def check(self, sequence: _Sequence, end: int) -> None:
        for position in range(end):
            slot = (sequence.block_ids[position // self.block_size], position % self.block_size)
            assert self.memory.get(slot) == sequence.token_ids[: position + 1], f"wrong KV at position {position}"

    def execute_model(self, step: SchedulerOutput) -> ModelRunnerOutput:
        assert 0 < step.total_num_scheduled_tokens <= self.max_num_batched_tokens
        for request_id in step.finished_request_ids:
            self.sequences.pop(request_id, None)
        starts = {}
        for new in step.new_requests:
            self.sequences[new.request_id] = _Sequence(
                [*new.prompt_token_ids, *new.generated_token_ids], list(new.block_ids)
            )
            starts[new.request_id] = new.num_computed_tokens
        for cached in step.cached_requests:
            self.sequences[cached.request_id].block_ids += cached.new_block_ids
            starts[cached.request_id] = cached.num_computed_tokens
        assert starts.keys() == step.num_scheduled_tokens.keys()
        output = ModelRunnerOutput()
        for request_id, num_tokens in step.num_scheduled_tokens.items():
            sequence, end = self.sequences[request_id], starts[request_id] + num_tokens
            assert num_tokens > 0
            assert end <= len(sequence.token_ids)
            self.write(sequence.block_ids, sequence.token_ids, starts[request_id], end)
        for request_id, num_tokens in step.num_scheduled_tokens.items():
            sequence, end = self.sequences[request_id], starts[request_id] + num_tokens
            self.check(sequence, end)
            if end == len(sequence.token_ids):
                output.sampled_token_ids[request_id] = next_token(sequence.token_ids)
                sequence.token_ids.append(output.sampled_token_ids[request_id])
        return output


class FakeConnector:
    """Worker side without a network: tests end sends and loads themselves."""

    def __init__(self) -> None:
        self.offers: dict[str, str] = {}
        self.sends: dict[str, list[int]] = {}
        """Transfer id -> blocks published so far. The peer may read them until the send ends."""
        self.send_complete: set[str] = set()
        self.loads: dict[str, BlockLoad] = {}
        self.cancelled: set[str] = set()
        self.hashes: dict[str, list[bytes]] = {}
        self._finished = ConnectorOutput()

    def step(self, step: SchedulerOutput) -> ConnectorOutput:
        metadata = step.connector
        for transfer_id, peer in metadata.offers.items():
            assert transfer_id not in self.offers
            self.offers[transfer_id] = peer
            self.sends[transfer_id] = []
        for load in metadata.loads:
            assert load.transfer_id not in self.loads
            assert len(load.block_ids) == len(load.block_hashes)
            self.loads[load.transfer_id] = load
        for transfer_id in metadata.cancels:
            assert transfer_id in self.sends or transfer_id in self.loads or self._has_ended(transfer_id)
            self.cancelled.add(transfer_id)
        for save in metadata.saves:
            if self._has_ended(save.transfer_id):
                continue
            blocks = self.sends[save.transfer_id]
            assert save.first_block_index == len(blocks), "blocks are published in order, each once"
            assert save.transfer_id not in self.send_complete
            blocks += save.block_ids
            self.hashes.setdefault(save.transfer_id, []).extend(save.block_hashes)
            if save.last:
                self.send_complete.add(save.transfer_id)
        finished, self._finished = self._finished, ConnectorOutput()
        return finished

    def _has_ended(self, transfer_id: str) -> bool:
        """It ended, but the scheduler has not heard of it yet."""
        return transfer_id in self._finished.finished_sending or transfer_id in self._finished.load_results

    def end_send(self, transfer_id: str) -> None:
        del self.sends[transfer_id], self.offers[transfer_id]
        self._finished.finished_sending.add(transfer_id)

    def end_load(self, transfer_id: str, num_valid_blocks: int | None = None, error: str = "") -> None:
        load = self.loads.pop(transfer_id)
        valid = len(load.block_ids) if num_valid_blocks is None else num_valid_blocks
        self._finished.load_results[transfer_id] = LoadResult(valid, error)


class FakeExecutor(Executor):
    """The fake model behind an EngineCoreProc. The prompt [13, 13, 13] makes its step fail; BATON_FAKE_STEP_S slows steps."""

    def __init__(self, config: EngineConfig, instance_id: str, wakeup: Callable[[], None]) -> None:
        super().__init__(config, instance_id, wakeup)
        self.runner = FakeRunner(config.cache.block_size, config.scheduler.max_num_batched_tokens)
        self.step_s = float(os.environ.get("BATON_FAKE_STEP_S", "0"))

    def initialize(self) -> ModelInfo:
        time.sleep(float(os.environ.get("BATON_FAKE_LOAD_S", "0")))
        return ModelInfo(self.config.cache.num_blocks or 64, VOCAB_SIZE, (EOS,), 512, "fake-hash")

    def execute_model(self, step: SchedulerOutput) -> None:
        self._step = step

    def sample_tokens(self, grammar: GrammarOutput | None) -> Future[ModelRunnerOutput]:
        future: Future[ModelRunnerOutput] = Future()
        try:
            future.set_result(self._run(self._step))
        except Exception as error:
            future.set_exception(error)
        return future

    def _run(self, step: SchedulerOutput) -> ModelRunnerOutput:
        if any(new.prompt_token_ids == [13, 13, 13] for new in step.new_requests):
            raise RuntimeError("the device is on fire")
        if not step.total_num_scheduled_tokens:
            return ModelRunnerOutput()
        time.sleep(self.step_s)
        return self.runner.execute_model(step)

    def collective_rpc(self, method: str, args: tuple[Any, ...] = (), *, timeout_s: float | None = None) -> list[Any]:
        raise NotImplementedError(method)

    def set_failure_callback(self, callback: Callable[[str], None]) -> None:
        pass

    def connector_stats(self) -> ConnectorStats | None:
        return None

    def shutdown(self) -> None:
        pass


class SlowFakeExecutor(FakeExecutor):
    """Every step takes long enough for things to happen meanwhile."""

    def __init__(self, config: EngineConfig, instance_id: str, wakeup: Callable[[], None]) -> None:
        super().__init__(config, instance_id, wakeup)
        self.step_s = 0.05


class FailedTransferExecutor(FakeExecutor):
    """Its KV connector has failed."""

    def connector_stats(self) -> ConnectorStats | None:
        return ConnectorStats(failure="the KV connector failed: a defect")
