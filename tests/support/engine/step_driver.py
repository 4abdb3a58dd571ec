"""A minimal scheduler without a policy, which drives a ModelRunner in chunks of random size.

For the tests of the ModelRunner and the worker.

`run` ends each step before the next is scheduled. `run_ahead` runs a step before it has the tokens
of the previous step, as asynchronous scheduling does. Between steps a test can swap requests out
and in, fork them, make their blocks writable, or replace a token.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from baton_engine.executor.step import (
    BlockCopy,
    CachedRequestData,
    GrammarOutput,
    ModelRunnerOutput,
    NewRequestData,
    PendingOutput,
    SchedulerOutput,
)
from baton_engine.worker.model_runner import ModelRunner
from baton_protocol.engine_messages import RoutedExperts, TokenLogprobs
from baton_protocol.options.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from baton_protocol.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
NUM_SWAP_BLOCKS = 64
VOCAB_SIZE = 512


def random_prompts(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Return prompts of these lengths with ids below VOCAB_SIZE and without special tokens."""
    draw = random.Random(seed)
    return [[draw.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in lengths]


def random_prompt(length: int, seed: int = 0) -> list[int]:
    return random_prompts([length], seed)[0]


class Runner(Protocol):
    """A ModelRunner, or several ranks that act as one ModelRunner."""

    config: EngineConfig

    def execute_model(self, step: SchedulerOutput) -> None: ...

    def sample_tokens(self, grammar: GrammarOutput | None) -> ModelRunnerOutput | PendingOutput: ...


def runner_config(
    path: Path, dtype: str = "float32", block_size: int = 16, max_num_seqs: int = 64
) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(path=str(path), dtype=dtype),
        cache=CacheConfig(block_size=block_size),
        scheduler=SchedulerConfig(max_num_seqs=max_num_seqs),
        device="cpu",
        num_threads=1,  # tensors are tiny: more threads only add waits
    )


def make_runner(
    path: Path,
    num_blocks: int = 256,
    dtype: str = "float32",
    block_size: int = 16,
    max_num_seqs: int = 64,
) -> ModelRunner:
    """Return a runner with a loaded model. All slots of its KV memory are NaN until written."""
    runner = ModelRunner(runner_config(path, dtype, block_size, max_num_seqs))
    runner.load_model()
    runner.allocate_kv_cache(num_blocks, NUM_SWAP_BLOCKS).fill_(float("nan"))
    return runner


@dataclass
class Request:
    request_id: str
    prompt: list[int]
    max_tokens: int
    params: SamplingParams = GREEDY
    sample_index: int = 0
    #: Not empty at the start: the request continues one of another engine.
    generated: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    routed_experts: list[RoutedExperts] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)
    #: Not empty while the request is swapped out.
    host_block_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    #: Tokens that steps in flight will sample.
    num_placeholders: int = 0
    known_to_worker: bool = False
    replaced_blocks: list[BlockCopy] = field(default_factory=list)
    new_token_ids: list[int] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.generated) + self.num_placeholders

    @property
    def done(self) -> bool:
        return len(self.generated) + self.num_placeholders >= self.max_tokens


@dataclass
class _Step:
    """A step, its sequences, and the ids of the sequences that sample in it."""

    output: SchedulerOutput
    sequences: list[Request]
    sampling: set[str]
    result: ModelRunnerOutput | PendingOutput | None = None


class StepDriver:
    """Runs sequences to their end in chunks of random size.

    Args:
        send_token_ids: send the tokens of cached requests, as for workers that do not sample.
    """

    def __init__(
        self, runner: Runner, num_blocks: int = 256, seed: int = 0, send_token_ids: bool = False
    ) -> None:
        self.runner = runner
        self.send_token_ids = send_token_ids
        self.random = random.Random(seed)
        self.block_size = runner.config.cache.block_size
        self.free_blocks = list(range(num_blocks))
        self.random.shuffle(self.free_blocks)
        self.free_host_blocks = list(range(NUM_SWAP_BLOCKS))
        self.random.shuffle(self.free_host_blocks)
        self.finished: list[str] = []
        self.swapping_out: list[BlockCopy] = []
        self.swapping_in: list[BlockCopy] = []
        self.copying: list[BlockCopy] = []

    def run(
        self, sequences: Sequence[Request], max_chunk: int = 24, join_probability: float = 1.0
    ) -> None:
        """Run all sequences to their end.

        Args:
            max_chunk: maximum number of tokens of a sequence in one step.
            join_probability: probability that another sequence joins the batch before a step.
        """
        waiting, running = list(sequences), []
        while waiting or running:
            while waiting and (not running or self.random.random() < join_probability):
                running.append(waiting.pop(0))
            self.step(running, max_chunk)
            for sequence in [s for s in running if s.done]:
                running.remove(sequence)
                self.release(sequence)

    def run_ahead(self, sequences: Sequence[Request]) -> None:
        """Run all sequences to their end. Read each step's tokens after the next step has run."""
        behind: _Step | None = None
        while behind is not None or not all(s.done for s in sequences):
            running = [s for s in sequences if not s.done]
            step = self._schedule(running, max_chunk=24) if running else None
            if step is not None:
                self.runner.execute_model(step.output)
            if behind is not None:
                self._finish(behind)
            if step is not None:
                step.result = self.runner.sample_tokens(None)
            behind = step
        for sequence in sequences:
            self.release(sequence)

    def step(
        self, sequences: Sequence[Request], max_chunk: int, grammar: GrammarOutput | None = None
    ) -> None:
        step = self._schedule(sequences, max_chunk)
        self.runner.execute_model(step.output)
        step.result = self.runner.sample_tokens(grammar)
        self._finish(step)

    def release(self, sequence: Request) -> None:
        """End or preempt a sequence: free its blocks and remove it from the worker."""
        self.finished.append(sequence.request_id)
        self.free_blocks += sequence.block_ids
        self.random.shuffle(self.free_blocks)
        sequence.block_ids, sequence.num_computed, sequence.known_to_worker = [], 0, False

    def swap_out(self, sequence: Request) -> None:
        """Preempt a sequence by copying its blocks to the host."""
        sequence.host_block_ids = [self.free_host_blocks.pop() for _ in sequence.block_ids]
        self.swapping_out += map(BlockCopy, sequence.block_ids, sequence.host_block_ids)
        num_computed = sequence.num_computed
        self.release(sequence)
        sequence.num_computed = num_computed

    def swap_in(self, sequence: Request) -> None:
        sequence.block_ids = [self.free_blocks.pop() for _ in sequence.host_block_ids]
        self.swapping_in += map(BlockCopy, sequence.host_block_ids, sequence.block_ids)
        self.free_host_blocks += sequence.host_block_ids
        sequence.host_block_ids = []

    def fork(self, parent: Request, child: Request) -> None:
        """Make `child` a copy of `parent` with shared blocks.

        The child computes the last token again, so its last block becomes writable.
        """
        child.prompt, child.generated = list(parent.prompt), list(parent.generated)
        child.num_computed, child.block_ids = parent.num_computed, list(parent.block_ids)
        self.make_writable(child)

    def make_writable(self, sequence: Request) -> None:
        """Copy the block into which the next token is written, if it exists (copy-on-write)."""
        index = sequence.num_computed // self.block_size
        if index >= len(sequence.block_ids):
            return
        copy = BlockCopy(sequence.block_ids[index], self.free_blocks.pop())
        self.copying.append(copy)
        sequence.block_ids[index] = copy.target
        if sequence.known_to_worker:
            sequence.replaced_blocks.append(copy)

    def replace_last_token(self, sequence: Request, token_id: int) -> None:
        """Replace the token that the worker sampled, as beam search does."""
        sequence.generated[-1] = token_id
        sequence.new_token_ids = [token_id]

    def _schedule(self, sequences: Sequence[Request], max_chunk: int) -> _Step:
        output = SchedulerOutput([], [], {}, self.finished)
        output.swap_out, output.swap_in, output.block_copies = (
            self.swapping_out,
            self.swapping_in,
            self.copying,
        )
        self.finished, self.swapping_out, self.swapping_in, self.copying = [], [], [], []
        sampling = set()
        for sequence in sequences:
            left = sequence.num_tokens - sequence.num_computed
            chunk = left if left == 1 else self.random.randint(1, min(left, max_chunk))
            end = sequence.num_computed + chunk
            needed = -(-end // self.block_size) - len(sequence.block_ids)
            new_blocks = [self.free_blocks.pop() for _ in range(max(0, needed))]
            sequence.block_ids += new_blocks
            if sequence.known_to_worker:
                tokens = sequence.new_token_ids
                if self.send_token_ids:
                    tokens = (sequence.prompt + sequence.generated)[sequence.num_computed : end]
                output.cached_requests.append(
                    CachedRequestData(
                        sequence.request_id,
                        new_blocks,
                        sequence.num_computed,
                        tokens,
                        sequence.replaced_blocks,
                    )
                )
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
            sequence.new_token_ids, sequence.replaced_blocks = [], []
            output.num_scheduled_tokens[sequence.request_id] = chunk
            sequence.num_computed = end
            if end == sequence.num_tokens:
                sampling.add(sequence.request_id)
                sequence.num_placeholders += 1
        return _Step(output, list(sequences), sampling)

    def _finish(self, step: _Step) -> None:
        """Append the tokens and reports of a step to its sequences."""
        result = step.result
        if isinstance(result, PendingOutput):
            result = result.result()
        assert result is not None
        assert set(result.sampled_token_ids) == step.sampling
        for sequence in step.sequences:
            request_id = sequence.request_id
            if request_id in step.sampling:
                sequence.generated.append(result.sampled_token_ids[request_id])
                sequence.num_placeholders -= 1
            if request_id in result.logprobs:
                sequence.logprobs.append(result.logprobs[request_id])
            sequence.prompt_logprobs += result.prompt_logprobs.get(request_id, [])
            if request_id in result.routed_experts:
                sequence.routed_experts.append(result.routed_experts[request_id])
