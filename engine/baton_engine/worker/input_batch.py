"""The persistent batch of a worker: arrays with one row per request, updated in place.

Python code handles a single request only when the request joins, gets a block or leaves. All other
work of a step is done by numpy on arrays of all requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from baton_engine.executor.step import CachedRequestData, NewRequestData
from baton_engine.models.forward_context import ForwardBatch, ForwardContext
from baton_engine.worker.devices import to_device
from baton_engine.worker.sampling.logits_processing import SamplingInput
from baton_engine.worker.sampling.sampled_tokens import BoolArray, Int64Array, SampledTokens
from baton_protocol.pooling_params import PoolingParams
from baton_protocol.sampling_params import SamplingParams

Int32Array = npt.NDArray[np.int32]

#: Initial number of columns of `InputBatch.token_ids`. A longer request at least doubles the
#: number, up to `max_model_len + 1`.
INITIAL_WIDTH = 1024
#: Start of the second text in rows that have only one text: a position past every prompt.
_NEVER = 2**62


@dataclass(slots=True)
class ScheduledRows:
    """The requests that a step runs: request i runs the positions [starts[i], ends[i])."""

    request_ids: list[str]
    rows: Int64Array
    starts: Int64Array
    ends: Int64Array
    #: Number of tokens of all requests together.
    num_tokens: int

    def __len__(self) -> int:
        return len(self.request_ids)

    @property
    def one_token_each(self) -> bool:
        return self.num_tokens == len(self.request_ids)

    @property
    def first_tokens(self) -> Int64Array:
        """Index of each request's first token in the step, followed by `num_tokens`: [n + 1]."""
        indices = np.zeros(len(self) + 1, dtype=np.int64)
        np.cumsum(self.ends - self.starts, out=indices[1:])
        return indices


class InputBatch:
    """Arrays with one row for each of at most `max_num_seqs` requests.

    A row holds the token ids of a request (prompt, then generated) and the block table, each with
    its length. A row also holds the number of tokens whose KV is in the cache, and four flags that
    follow from the sampling parameters.

    A token that the last step sampled can be pending: on the device, but not yet in `token_ids`.
    Only the last token of a row can be pending. Methods that need the token on the host wait for
    the copy.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.token_ids: Int64Array = np.zeros(
            (max_num_seqs, min(INITIAL_WIDTH, max_model_len + 1)), dtype=np.int64
        )
        self.num_tokens: Int64Array = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_prompt_tokens: Int64Array = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_computed_tokens: Int64Array = np.zeros(max_num_seqs, dtype=np.int64)
        self.block_tables: Int32Array = np.zeros(
            (max_num_seqs, -(-max_model_len // block_size) + 1), dtype=np.int32
        )
        self.num_blocks: Int64Array = np.zeros(max_num_seqs, dtype=np.int64)
        #: Whether the request needs only the argmax of the raw logits, and no log-probabilities.
        self.is_plain: BoolArray = np.zeros(max_num_seqs, dtype=np.bool_)
        #: Whether log-probabilities of the next token or of beam candidates are reported.
        self.wants_logprobs: BoolArray = np.zeros(max_num_seqs, dtype=np.bool_)
        self.wants_prompt_logprobs: BoolArray = np.zeros(max_num_seqs, dtype=np.bool_)
        self.wants_routed_experts: BoolArray = np.zeros(max_num_seqs, dtype=np.bool_)
        self._pending: SampledTokens | None = None
        #: For each row, the index of its pending token in `_pending`. -1: no token is pending.
        self._pending_index: Int64Array = np.full(max_num_seqs, -1, dtype=np.int64)
        self._inputs: list[SamplingInput | None] = [None] * max_num_seqs
        self._pooling_params: list[PoolingParams | None] = [None] * max_num_seqs
        #: For each row, the position where the second text of a pair begins, or _NEVER.
        self._second_text_start: Int64Array = np.full(max_num_seqs, _NEVER, dtype=np.int64)
        self._row_of: dict[str, int] = {}
        self._free_rows = list(reversed(range(max_num_seqs)))
        #: Argument and result of the last call of `rows`, which the next call reuses if it has the
        #: same argument. Consecutive steps often run the same requests.
        self._last_rows: tuple[list[str], Int64Array] = ([], np.zeros(0, dtype=np.int64))
        self._one_query_each = np.arange(max_num_seqs + 1, dtype=np.int32)

    def rows(self, request_ids: list[str]) -> Int64Array:
        """Return the row of each request. The caller must not change the returned array.

        Raises:
            RuntimeError: a request is not in the batch.
        """
        known_ids, rows = self._last_rows
        if request_ids == known_ids:
            return rows
        try:
            rows = np.array(
                [self._row_of[request_id] for request_id in request_ids], dtype=np.int64
            )
        except KeyError as error:
            raise RuntimeError(
                f"request {error.args[0]} is scheduled as known, but is not in this worker's batch"
            ) from None
        self._last_rows = (request_ids, rows)
        return rows

    def remove(self, request_ids: Sequence[str]) -> None:
        """Remove requests. Ignore ids that are not in the batch."""
        for request_id in request_ids:
            row = self._row_of.pop(request_id, None)
            if row is not None:
                self._inputs[row] = None
                self._pending_index[row] = -1
                self._free_rows.append(row)
                self._last_rows = ([], self._last_rows[1][:0])

    def add(self, new: NewRequestData) -> None:
        """Add a request. Replace any request that has the same id.

        Raises:
            RuntimeError: no row is free or the request is too long. Both are scheduler defects.
        """
        self.remove((new.request_id,))
        if not self._free_rows:
            raise RuntimeError(
                f"request {new.request_id}: all {len(self._inputs)} rows of the input batch are "
                "in use"
            )
        num_prompt, num_generated = len(new.prompt_token_ids), len(new.generated_token_ids)
        num_tokens = num_prompt + num_generated
        if num_tokens > self.max_model_len:
            raise RuntimeError(
                f"request {new.request_id} has {num_tokens} tokens, over "
                f"max_model_len={self.max_model_len}"
            )
        self._make_room(num_tokens)
        row = self._free_rows.pop()
        self._row_of[new.request_id] = row
        self.token_ids[row, :num_prompt] = new.prompt_token_ids
        self.token_ids[row, num_prompt:num_tokens] = new.generated_token_ids
        self.num_prompt_tokens[row] = num_prompt
        self.num_tokens[row] = num_tokens
        self.num_computed_tokens[row] = new.num_computed_tokens
        self.num_blocks[row] = 0
        self._append_blocks(row, new.block_ids)
        params = new.sampling_params
        self.is_plain[row] = _is_plain(params)
        self.wants_logprobs[row] = params.logprobs is not None or bool(params.beam_width)
        self.wants_prompt_logprobs[row] = params.prompt_logprobs is not None
        self.wants_routed_experts[row] = params.return_routed_experts
        self._pooling_params[row] = new.pooling_params
        second = None if new.pooling_params is None else new.pooling_params.second_text_start
        self._second_text_start[row] = _NEVER if second is None else second
        ids = self.token_ids[row]
        self._inputs[row] = SamplingInput(
            params, ids[:num_prompt], ids[num_prompt:num_tokens], new.sample_index
        )

    def update(self, cached: Sequence[CachedRequestData]) -> None:
        """Apply a step's changes to requests that are in the batch.

        For most requests, only the number of computed tokens changes.

        Raises:
            RuntimeError: a request is not in the batch. This is a scheduler defect.
        """
        if not cached:
            return
        rows = self.rows([request.request_id for request in cached])
        self.num_computed_tokens[rows] = [request.num_computed_tokens for request in cached]
        for index, request in enumerate(cached):
            if request.new_block_ids or request.new_token_ids or request.replaced_blocks:
                self._change(int(rows[index]), request)

    def schedule(self, num_scheduled_tokens: dict[str, int]) -> ScheduledRows:
        """Return the rows and positions that a step runs, in the order of `num_scheduled_tokens`.

        Raises:
            RuntimeError: the step runs past the last known token of a request. This is a scheduler
                defect.
        """
        request_ids = list(num_scheduled_tokens)
        rows = self.rows(request_ids)
        counts = np.fromiter(num_scheduled_tokens.values(), dtype=np.int64, count=len(rows))
        starts = self.num_computed_tokens[rows]
        ends = starts + counts
        beyond = ends > self.num_tokens[rows]
        if beyond.any():
            index = int(beyond.argmax())
            raise RuntimeError(
                f"request {request_ids[index]} is to run up to position {ends[index]}, but only "
                f"{self.num_tokens[rows[index]]} of its tokens are known"
            )
        return ScheduledRows(request_ids, rows, starts, ends, int(counts.sum()))

    def make_forward_batch(
        self, scheduled: ScheduledRows, kv_cache: torch.Tensor, device: torch.device
    ) -> ForwardBatch:
        """Return the input tensors of the step's forward.

        On a CPU, the tensors share memory with numpy arrays. To a GPU, the arrays are copied
        asynchronously. Pending tokens are copied on the device, without a wait.
        """
        starts, ends = scheduled.starts, scheduled.ends
        if scheduled.one_token_each:
            row_of, positions = scheduled.rows, starts
            cu_seqlens = self._one_query_each[: len(scheduled) + 1]
            longest = 1
        else:
            # Token i of the step belongs to row row_of[i] of the batch, at positions[i].
            counts = ends - starts
            first = scheduled.first_tokens
            row_of = scheduled.rows.repeat(counts)
            positions = np.arange(scheduled.num_tokens) + (starts - first[:-1]).repeat(counts)
            cu_seqlens = first.astype(np.int32)
            longest = int(counts.max())
        block_index, offset = np.divmod(positions, self.block_size)
        slots = self.block_tables[row_of, block_index].astype(np.int64) * self.block_size + offset
        max_blocks = -(-int(ends.max()) // self.block_size)

        def move(array: npt.NDArray[np.generic]) -> torch.Tensor:
            return to_device(array, device)

        context = ForwardContext(
            slot_mapping=move(slots),
            block_tables=move(self.block_tables[:, :max_blocks].take(scheduled.rows, axis=0)),
            cu_seqlens_q=move(cu_seqlens),
            seq_lens=move(ends.astype(np.int32)),
            kv_cache=kv_cache,
            max_seqlen_q=longest,
        )
        if self._second_text_start[scheduled.rows].min() != _NEVER:
            is_second = positions >= self._second_text_start[row_of]
            context.token_types = move(is_second.astype(np.int64))
        input_ids = move(self.token_ids[row_of, positions])
        if self._pending is not None:
            self._fill_in(input_ids, scheduled, self._pending)
        return ForwardBatch(input_ids, move(positions), context)

    def reaches_last_token(self, scheduled: ScheduledRows) -> BoolArray:
        """Return for each request whether its last known token runs. If so, the request samples."""
        return scheduled.ends == self.num_tokens[scheduled.rows]

    def sampling_inputs(self, rows: Int64Array) -> list[SamplingInput]:
        """Return the sampler's input for each row.

        The token ids in the inputs are views, which are valid until the batch changes.
        """
        self.settle()
        inputs = []
        ends, prompt_ends = self.num_tokens[rows].tolist(), self.num_prompt_tokens[rows].tolist()
        for row, prompt_end, end in zip(rows.tolist(), prompt_ends, ends, strict=True):
            item = self.sampling_input(row)
            item.generated_token_ids = self.token_ids[row, prompt_end:end]
            inputs.append(item)
        return inputs

    def sampling_input(self, row: int) -> SamplingInput:
        item = self._inputs[row]
        assert item is not None, f"row {row} is free"
        return item

    def pooling_params(self, row: int) -> PoolingParams:
        params = self._pooling_params[row]
        assert params is not None, f"the request of row {row} is not pooled"
        return params

    def append_tokens(self, rows: Int64Array, token_ids: npt.ArrayLike) -> None:
        """Append one token to each row. A later step runs these tokens."""
        positions = self._extend(rows)
        self.token_ids[rows, positions] = token_ids

    def append_pending(self, rows: Int64Array, tokens: SampledTokens) -> None:
        """Append one token to each of `rows`. The tokens are pending until `settle` writes them.

        Wait only for the copy of tokens that were already pending before this call.
        """
        self._extend(rows)
        self._pending = tokens
        self._pending_index[rows] = np.arange(len(rows))

    def settle(self) -> None:
        """Wait until the pending tokens are on the host, and write them to `token_ids`."""
        if self._pending is None:
            return
        token_ids = self._pending.wait()
        self._pending = None
        rows = np.flatnonzero(self._pending_index >= 0)
        self.token_ids[rows, self.num_tokens[rows] - 1] = token_ids[self._pending_index[rows]]
        self._pending_index[rows] = -1

    def _extend(self, rows: Int64Array) -> Int64Array:
        """Lengthen each row by one token. Return the positions of the new tokens."""
        self.settle()
        ends = self.num_tokens[rows]
        self._make_room(int(ends.max()) + 1)
        self.num_tokens[rows] = ends + 1
        return ends

    def _fill_in(
        self, input_ids: torch.Tensor, scheduled: ScheduledRows, pending: SampledTokens
    ) -> None:
        """Write the pending tokens that the step runs into `input_ids`, by a copy on the device."""
        sources = self._pending_index[scheduled.rows]
        is_pending = self.reaches_last_token(scheduled) & (sources >= 0)
        if is_pending.any():
            targets = scheduled.first_tokens[1:] - 1
            places = np.stack((targets[is_pending], sources[is_pending]))
            target, source = to_device(places, input_ids.device)
            input_ids[target] = pending.token_ids[source]

    def _change(self, row: int, request: CachedRequestData) -> None:
        table = self.block_tables[row, : self.num_blocks[row]]
        for source, target in request.replaced_blocks:
            table[table == source] = target
        self._append_blocks(row, request.new_block_ids)
        if request.new_token_ids:
            self.settle()  # a later call would overwrite one of these tokens
            start = request.num_computed_tokens
            end = start + len(request.new_token_ids)
            self._make_room(end)
            self.token_ids[row, start:end] = request.new_token_ids
            self.num_tokens[row] = max(int(self.num_tokens[row]), end)

    def _append_blocks(self, row: int, block_ids: list[int]) -> None:
        start = self.num_blocks[row]
        self.block_tables[row, start : start + len(block_ids)] = block_ids
        self.num_blocks[row] += len(block_ids)

    def _make_room(self, num_tokens: int) -> None:
        """Widen the array `token_ids` if a request of `num_tokens` tokens does not fit."""
        rows, width = self.token_ids.shape
        if num_tokens <= width:
            return
        # The extra column is for the token that asynchronous scheduling may sample past
        # max_model_len, and then drops.
        wider = np.zeros(
            (rows, min(max(num_tokens, 2 * width), self.max_model_len + 1)), dtype=np.int64
        )
        wider[:, :width] = self.token_ids
        self.token_ids = wider
        for row in self._row_of.values():
            self.sampling_input(row).prompt_token_ids = wider[row, : self.num_prompt_tokens[row]]


def _is_plain(params: SamplingParams) -> bool:
    """Return whether `params` select the argmax of the raw logits and no log-probabilities."""
    return params.temperature == 0 and not (
        params.logit_bias
        or params.min_tokens
        or params.repetition_penalty != 1.0
        or params.frequency_penalty
        or params.presence_penalty
        or params.logprobs is not None
        or params.allowed_token_ids is not None
        or params.bad_words_token_ids
        or params.structured_output is not None
        or params.beam_width
    )
