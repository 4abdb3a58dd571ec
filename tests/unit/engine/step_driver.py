"""A tiny hand-made scheduler: drives a ModelRunner with chosen chunk sizes, blocks in shuffled order, no policy at all."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from baton_engine.core.step import CachedRequestData, NewRequestData, SchedulerOutput
from baton_engine.protocol.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from baton_engine.protocol.messages import TokenLogprobs
from baton_engine.protocol.sampling import SamplingParams
from baton_engine.worker.model_runner import ModelRunner

GREEDY = SamplingParams(temperature=0.0)


def make_runner(
    path: Path, num_blocks: int = 256, dtype: str = "float32", block_size: int = 16, max_num_seqs: int = 64
) -> ModelRunner:
    """A loaded runner whose whole KV memory is NaN: whatever it reads, it must have written."""
    runner = ModelRunner(
        EngineConfig(
            model=ModelConfig(path=str(path), dtype=dtype),
            cache=CacheConfig(block_size=block_size),
            scheduler=SchedulerConfig(max_num_seqs=max_num_seqs),
            device="cpu",
            num_threads=1,  # tiny tensors: more threads only wait for each other
        )
    )
    runner.load_model()
    runner.allocate_kv_cache(num_blocks).fill_(float("nan"))
    return runner


@dataclass
class Request:
    request_id: str
    prompt: list[int]
    max_tokens: int
    params: SamplingParams = GREEDY
    sample_index: int = 0
    generated: list[int] = field(default_factory=list)
    """Given: a request continued from elsewhere."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    known_to_worker: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.generated)

    @property
    def done(self) -> bool:
        return len(self.generated) >= self.max_tokens


class StepDriver:
    """Runs sequences to their end, all of them together, in chunks of at most `max_chunk` tokens of random size."""

    def __init__(self, runner: ModelRunner, num_blocks: int = 256, seed: int = 0) -> None:
        self.runner = runner
        self.random = random.Random(seed)
        self.block_size = runner.config.cache.block_size
        self.free_blocks = list(range(num_blocks))
        self.random.shuffle(self.free_blocks)
        self.finished: list[str] = []

    def run(self, sequences: Sequence[Request], max_chunk: int = 24, join_probability: float = 1.0) -> None:
        """Sequences join the batch one by one (with `join_probability` per step) and leave it when done."""
        waiting, running = list(sequences), []
        while waiting or running:
            while waiting and (not running or self.random.random() < join_probability):
                running.append(waiting.pop(0))
            self.step(running, max_chunk)
            for sequence in [s for s in running if s.done]:
                running.remove(sequence)
                self.release(sequence)

    def step(self, sequences: Sequence[Request], max_chunk: int) -> None:
        output = SchedulerOutput([], [], {}, self.finished)
        self.finished = []
        for sequence in sequences:
            left = sequence.num_tokens - sequence.num_computed
            chunk = left if left == 1 else self.random.randint(1, min(left, max_chunk))
            needed = -(-(sequence.num_computed + chunk) // self.block_size) - len(sequence.block_ids)
            new_blocks = [self.free_blocks.pop() for _ in range(max(0, needed))]
            sequence.block_ids += new_blocks
            if sequence.known_to_worker:
                output.cached_requests.append(CachedRequestData(sequence.request_id, new_blocks, sequence.num_computed))
            else:
                output.new_requests.append(
                    NewRequestData(
                        sequence.request_id,
                        sequence.prompt,
                        list(sequence.generated),
                        sequence.params,
                        sequence.sample_index,
                        list(sequence.block_ids),
                        sequence.num_computed,
                    )
                )
                sequence.known_to_worker = True
            output.num_scheduled_tokens[sequence.request_id] = chunk
        self.runner.execute_model(output)
        result = self.runner.sample_tokens(None)
        for sequence in sequences:
            sequence.num_computed += output.num_scheduled_tokens[sequence.request_id]
            reached_end = sequence.num_computed == sequence.num_tokens
            assert reached_end == (sequence.request_id in result.sampled_token_ids)
            if reached_end:
                sequence.generated.append(result.sampled_token_ids[sequence.request_id])
            if sequence.request_id in result.logprobs:
                sequence.logprobs.append(result.logprobs[sequence.request_id])

    def release(self, sequence: Request) -> None:
        """Ends or preempts: the worker forgets it, its blocks are free."""
        self.finished.append(sequence.request_id)
        self.free_blocks += sequence.block_ids
        self.random.shuffle(self.free_blocks)
        sequence.block_ids, sequence.num_computed, sequence.known_to_worker = [], 0, False
