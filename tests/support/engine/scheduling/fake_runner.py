"""A deterministic model and a connector without a network.

For the tests of the scheduler and the engine core.

The next token is a hash of all tokens so far, so any mistake in scheduling, resuming or offsets
changes the text. The fake keeps a shadow KV memory and checks that each position it reads was
written with the right tokens. A wrong block therefore fails the test.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from baton_engine.executor.step import BlockCopy, GrammarOutput, ModelRunnerOutput, SchedulerOutput
from baton_engine.scheduling.sequence_groups.beam_search import (
    BeamConfig,
    BeamState,
    FinishedBeams,
    advance,
)
from baton_kv_transfer.connector import ConnectorOutput, LoadRequest, LoadResult
from baton_protocol.engine_messages import RoutedExperts, TokenLogprobs
from baton_protocol.sampling_params import SamplingParams

VOCAB_SIZE = 1000
EOS = 0


def next_token(token_ids: Sequence[int]) -> int:
    return zlib.crc32(repr(list(token_ids)).encode()) % VOCAB_SIZE


def continuation(prompt: Sequence[int], num_tokens: int, *, ignore_eos: bool = False) -> list[int]:
    """Return the tokens that the fake model generates after `prompt`."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens))
        if tokens[-1] == EOS and not ignore_eos:
            break
    return tokens[len(prompt) :]


def candidates(token_ids: Sequence[int], num_candidates: int) -> list[tuple[int, float]]:
    """Return the fake model's next (token id, log-probability) pairs, best first."""
    first = next_token(token_ids)
    gap = 1 + first % 7
    return [
        ((first + index * gap) % VOCAB_SIZE, -0.1 * (index + 1) * gap)
        for index in range(num_candidates)
    ]


def beam_search(
    prompt: list[int], params: SamplingParams, stop_token_ids: frozenset[int]
) -> list[list[int]]:
    """Return the hypotheses of a reference beam search over the fake model, best first."""
    config = BeamConfig(
        params.beam_width,
        params.max_tokens,
        stop_token_ids,
        params.length_penalty,
        params.early_stopping,
    )
    beams: list[tuple[float, list[int]]] = [(0.0, [])]
    finished: FinishedBeams[list[int]] = FinishedBeams(config.width)
    while beams:
        step = advance(
            [BeamState(score, len(tokens)) for score, tokens in beams],
            [candidates([*prompt, *tokens], 2 * config.width) for _, tokens in beams],
            config,
            finished.scores,
        )
        for beam in step.finished:
            finished.add(beam.score, [*beams[beam.parent][1], beam.token_id])
        beams = [
            (logprob, [*beams[parent][1], token_id]) for parent, token_id, logprob in step.live
        ]
    return list(finished)


@dataclass
class _Sequence:
    token_ids: list[int]
    block_ids: list[int]
    num_prompt: int
    params: SamplingParams


@dataclass
class FakeRunner:
    block_size: int
    max_num_batched_tokens: int
    #: Append sampled tokens to the worker's sequences. False: as a stage that does not sample.
    appends: bool = True
    #: (block, offset) -> all tokens up to the one whose KV is stored there.
    memory: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    host_memory: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    offload_memory: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    sequences: dict[str, _Sequence] = field(default_factory=dict)
    max_num_seqs: int = 1 << 30

    def write(
        self, block_ids: Sequence[int], token_ids: Sequence[int], start: int, end: int
    ) -> None:
        for position in range(start, end):
            slot = (block_ids[position // self.block_size], position % self.block_size)
            self.memory[slot] = list(token_ids[: position + 1])

    def check(self, sequence: _Sequence, end: int) -> None:
        for position in range(end):
            slot = (sequence.block_ids[position // self.block_size], position % self.block_size)
            assert self.memory.get(slot) == sequence.token_ids[: position + 1], (
                f"wrong KV at position {position}"
            )

    def execute_model(
        self, step: SchedulerOutput, grammar: GrammarOutput | None = None
    ) -> ModelRunnerOutput:
        """Apply a step as `executor/step.py` specifies."""
        starts = self._begin(step)
        output = ModelRunnerOutput()
        for request_id, num_tokens in step.num_scheduled_tokens.items():
            self._sample(request_id, starts[request_id], num_tokens, grammar, output)
        return output

    def fail_to_run(self, step: SchedulerOutput) -> None:
        """Apply a step whose forward pass fails. The KV of the step's tokens becomes invalid."""
        for request_id, start in self._begin(step).items():
            sequence = self.sequences[request_id]
            for position in range(start, start + step.num_scheduled_tokens[request_id]):
                self.memory[
                    sequence.block_ids[position // self.block_size], position % self.block_size
                ] = [-3]

    def _begin(self, step: SchedulerOutput) -> dict[str, int]:
        """Apply a step up to sampling. Return request id -> first position of the step's tokens."""
        assert step.total_num_scheduled_tokens <= self.max_num_batched_tokens
        assert step.reaches_model_runner
        _copy(step.store, self.memory, self.offload_memory, self.block_size)
        for load in step.connector.loads:  # as if the peer wrote at once
            self.memory.update(
                {
                    (block, offset): [-2]
                    for block in load.block_ids
                    for offset in range(self.block_size)
                }
            )
        for request_id in step.finished_request_ids:
            self.sequences.pop(request_id, None)
        _copy(step.swap_out, self.memory, self.host_memory, self.block_size)
        _copy(step.swap_in, self.host_memory, self.memory, self.block_size)
        _copy(step.restore, self.offload_memory, self.memory, self.block_size)
        assert not {c.source for c in step.block_copies} & {c.target for c in step.block_copies}
        _copy(step.block_copies, self.memory, self.memory, self.block_size)
        starts = self._update_sequences(step)
        assert len(self.sequences) <= self.max_num_seqs, (
            "more sequences than rows in the worker's batch"
        )
        written: set[int] = set()
        for request_id, num_tokens in step.num_scheduled_tokens.items():
            sequence, start = self.sequences[request_id], starts[request_id]
            end = start + num_tokens
            assert num_tokens > 0
            assert end <= len(sequence.token_ids), (
                "the worker does not have all tokens of the chunk"
            )
            blocks = set(sequence.block_ids[start // self.block_size : -(-end // self.block_size)])
            assert not blocks & written, "two sequences write to one block"
            written |= blocks
            self.write(sequence.block_ids, sequence.token_ids, start, end)
        return starts

    def _update_sequences(self, step: SchedulerOutput) -> dict[str, int]:
        starts = {}
        for new in step.new_requests:
            self.sequences[new.request_id] = _Sequence(
                [*new.prompt_token_ids, *new.generated_token_ids],
                list(new.block_ids),
                len(new.prompt_token_ids),
                new.sampling_params,
            )
            starts[new.request_id] = new.num_computed_tokens
        for cached in step.cached_requests:
            sequence = self.sequences[cached.request_id]
            replaced = dict(cached.replaced_blocks)
            sequence.block_ids = [
                replaced.get(block_id, block_id) for block_id in sequence.block_ids
            ]
            sequence.block_ids += cached.new_block_ids
            start = starts[cached.request_id] = cached.num_computed_tokens
            if cached.new_token_ids:
                assert start <= len(sequence.token_ids)
                sequence.token_ids[start : start + len(cached.new_token_ids)] = cached.new_token_ids
        assert starts.keys() == step.num_scheduled_tokens.keys()
        return starts

    def _sample(
        self,
        request_id: str,
        start: int,
        num_tokens: int,
        grammar: GrammarOutput | None,
        output: ModelRunnerOutput,
    ) -> None:
        sequence, end = self.sequences[request_id], start + num_tokens
        params = sequence.params
        self.check(sequence, end)
        if params.prompt_logprobs is not None and start + 1 < sequence.num_prompt:
            predicted = sequence.token_ids[start + 1 : min(end + 1, sequence.num_prompt)]
            output.prompt_logprobs[request_id] = [
                TokenLogprobs(token_id, -1.0) for token_id in predicted
            ]
        if params.return_routed_experts:
            experts = b"".join(position.to_bytes(2, "little") for position in range(start, end))
            output.routed_experts[request_id] = RoutedExperts((num_tokens, 1, 1), experts)
        if end < len(sequence.token_ids):
            return
        token_id = next_token(sequence.token_ids)
        if grammar is not None and request_id in grammar.request_ids:
            mask = grammar.bitmask[grammar.request_ids.index(request_id)]
            while not int(mask[token_id // 32]) >> token_id % 32 & 1:
                token_id = (token_id + 1) % VOCAB_SIZE
        if params.beam_width:
            top = candidates(sequence.token_ids, 2 * params.beam_width)
            output.logprobs[request_id] = TokenLogprobs(token_id, top[0][1], 1, top)
        output.sampled_token_ids[request_id] = token_id
        if self.appends:
            sequence.token_ids.append(token_id)


def _copy(
    copies: list[BlockCopy],
    source: dict[tuple[int, int], list[int]],
    target: dict[tuple[int, int], list[int]],
    block_size: int,
) -> None:
    assert len({copy.target for copy in copies}) == len(copies), "two copies into one block"
    for copy in copies:
        for offset in range(block_size):
            target[copy.target, offset] = source.get((copy.source, offset), [])


class FakeConnector:
    """The connector's worker side without a network. Tests end sends and loads."""

    def __init__(self) -> None:
        self.offers: dict[str, str] = {}
        #: Transfer id -> blocks published so far. The peer may read them until the send ends.
        self.sends: dict[str, list[int]] = {}
        self.send_complete: set[str] = set()
        self.loads: dict[str, LoadRequest] = {}
        self.cancelled: set[str] = set()
        self.hashes: dict[str, list[bytes]] = {}
        self._finished = ConnectorOutput()
        self._ended: set[str] = set()

    def step(self, step: SchedulerOutput) -> ConnectorOutput:
        self.start(step)
        finished, self._finished = self._finished, ConnectorOutput()
        return finished

    def start(self, step: SchedulerOutput) -> None:
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
            assert (
                transfer_id in self.sends
                or transfer_id in self.loads
                or self._has_ended(transfer_id)
            )
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

    def _has_ended(self, transfer_id: str) -> bool:
        """Return whether the transfer has ended. The scheduler may be one step behind."""
        return transfer_id in self._ended

    def end_send(self, transfer_id: str) -> None:
        del self.sends[transfer_id], self.offers[transfer_id]
        self._ended.add(transfer_id)
        self._finished.finished_sending.add(transfer_id)

    def end_load(
        self, transfer_id: str, num_valid_blocks: int | None = None, error: str = ""
    ) -> None:
        load = self.loads.pop(transfer_id)
        self._ended.add(transfer_id)
        valid = len(load.block_ids) if num_valid_blocks is None else num_valid_blocks
        self._finished.load_results[transfer_id] = LoadResult(valid, error)
