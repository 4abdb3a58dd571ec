"""A scheduler with the fake model and connector, one call per step.

For the tests of the scheduler.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from baton_engine.executor.step import ModelRunnerOutput, SchedulerOutput
from baton_engine.kv_cache.kv_cache_manager import KVCacheManager
from baton_engine.scheduling.scheduler import Scheduler
from baton_engine.scheduling.scheduler_state import SchedulerState
from baton_protocol.engine_messages import EngineCoreOutput, EngineCoreRequest
from baton_protocol.options.config import SchedulerConfig
from baton_protocol.sampling_params import SamplingParams
from support.engine.scheduling.fake_runner import EOS, FakeConnector, FakeRunner
from support.engine.scheduling.scheduler_machine import FakeGrammars

BLOCK = 4


class Engine:
    """A scheduler with the fake model and connector."""

    def __init__(
        self,
        *,
        num_blocks: int = 32,
        budget: int = 16,
        max_num_seqs: int = 8,
        max_queue: int = 16,
        fail: bool = False,
        num_swap_blocks: int = 0,
        num_offload_blocks: int = 0,
        watermark_blocks: int = 0,
        prefix_caching: bool = True,
        grammars: FakeGrammars | None = None,
        **options: Any,
    ) -> None:
        """Create an idle scheduler. `options` are further fields of SchedulerConfig."""
        self.kv = KVCacheManager(
            num_blocks,
            BLOCK,
            "model",
            num_swap_blocks=num_swap_blocks,
            num_offload_blocks=num_offload_blocks,
            enable_prefix_caching=prefix_caching,
        )
        config = SchedulerConfig(
            max_num_batched_tokens=budget,
            max_num_seqs=max_num_seqs,
            max_queue=max_queue,
            **options,
        )
        state = SchedulerState(
            config,
            self.kv,
            max_model_len=num_blocks * BLOCK,
            eos_token_ids=[EOS],
            watermark_blocks=watermark_blocks,
            fail_on_load_error=fail,
            structured_output=grammars,  # type: ignore[arg-type]
        )
        self.scheduler = Scheduler(state)
        self.runner = FakeRunner(BLOCK, budget, max_num_seqs=max_num_seqs)
        self.in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self.connector = FakeConnector()
        self.outputs: dict[str, list[EngineCoreOutput]] = {}

    def add(
        self,
        request_id: str,
        prompt: list[int],
        max_tokens: int = 4,
        params: dict[str, Any] | None = None,
        **fields: Any,
    ) -> None:
        """Add a request. `params` are further fields of its SamplingParams."""
        sampling = SamplingParams(max_tokens=max_tokens, **{"ignore_eos": True, **(params or {})})
        self.scheduler.add_request(EngineCoreRequest(request_id, prompt, sampling, **fields))

    def schedule(self) -> SchedulerOutput:
        """Schedule a step and put it in flight."""
        step = self.scheduler.schedule()
        output = ModelRunnerOutput()
        if step.reaches_model_runner:
            output = self.runner.execute_model(step, self.scheduler.grammar_output(step))
        output.connector = self.connector.step(step)
        self.in_flight.append((step, output))
        return step

    def update(self) -> None:
        """Update the scheduler from the oldest step in flight."""
        for out in self.scheduler.update_from_output(*self.in_flight.popleft()):
            self.outputs.setdefault(out.request_id, []).append(out)

    def step(self) -> SchedulerOutput:
        step = self.schedule()
        self.update()
        return step

    def run(self) -> None:
        """Run steps until the scheduler makes no progress."""
        for _ in range(1000):
            self.step()
            if not self.scheduler.made_progress:
                return
        raise AssertionError("the scheduler still makes progress after 1000 steps")

    def text(self, request_id: str) -> list[int]:
        return [token for output in self.outputs[request_id] for token in output.new_token_ids]

    def last(self, request_id: str) -> EngineCoreOutput:
        return self.outputs[request_id][-1]

    def load(
        self, transfer_id: str, tokens: list[int], num_valid: int | None = None, error: str = ""
    ) -> None:
        """Fill the blocks of a load with the KV of `tokens`, then end the load.

        Args:
            num_valid: number of valid blocks; None for all.
        """
        load = self.connector.loads[transfer_id]
        for index, block_id in enumerate(load.block_ids[:num_valid]):
            start = (load.first_block_index + index) * BLOCK
            for position in range(start, min(start + BLOCK, len(tokens))):
                self.runner.memory[(block_id, position % BLOCK)] = tokens[: position + 1]
        self.connector.end_load(transfer_id, num_valid, error)
