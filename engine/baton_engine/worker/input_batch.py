"""The worker's memory of its requests: one row of plain arrays per request, changed in place from step to step.

A step costs copying the scheduled tokens and gathering the rows' block tables; nothing is rebuilt from lists.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from baton_engine.core.step import CachedRequestData, NewRequestData, SchedulerOutput
from baton_engine.models.layers import ForwardBatch
from baton_engine.protocol.sampling import SamplingParams
from baton_engine.worker.sampler import SamplingInput

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


class InputBatch:
    """Rows of at most `max_num_seqs` requests of at most `max_model_len` tokens.

    Columns, by row: token ids (prompt, then generated), their number, the prompt's length, tokens whose KV is in the cache,
    the block table and its length.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.token_ids: Int64Array = np.zeros((max_num_seqs, max_model_len + 1), dtype=np.int64)
        self.num_tokens: Int32Array = np.zeros(max_num_seqs, dtype=np.int32)
        self.num_prompt_tokens: Int32Array = np.zeros(max_num_seqs, dtype=np.int32)
        self.num_computed_tokens: Int32Array = np.zeros(max_num_seqs, dtype=np.int32)
        self.block_tables: Int32Array = np.zeros((max_num_seqs, -(-max_model_len // block_size) + 1), dtype=np.int32)
        self.num_blocks: Int32Array = np.zeros(max_num_seqs, dtype=np.int32)
        self._sampling: list[tuple[SamplingParams, int] | None] = [None] * max_num_seqs
        self._row_of: dict[str, int] = {}
        self._free_rows = list(reversed(range(max_num_seqs)))

    def __len__(self) -> int:
        return len(self._row_of)

    def apply(self, step: SchedulerOutput) -> None:
        """Forgets finished requests, takes in new ones, and moves the others on.

        Raises:
            RuntimeError: if the step contradicts what this worker knows; that is a bug of the scheduler.
        """
        for request_id in step.finished_request_ids:
            self.remove(request_id)
        for new in step.new_requests:
            self._add(new)
        for cached in step.cached_requests:
            self._update(cached)

    def remove(self, request_id: str) -> None:
        """Forgets a request; unknown ones (never scheduled) are fine."""
        row = self._row_of.pop(request_id, None)
        if row is not None:
            self._sampling[row] = None
            self._free_rows.append(row)

    def make_forward_batch(
        self, num_scheduled_tokens: dict[str, int], kv_cache: torch.Tensor, device: torch.device
    ) -> ForwardBatch:
        """The step's tensors, sequences in the order of `num_scheduled_tokens`."""
        rows = np.array([self._row_of[request_id] for request_id in num_scheduled_tokens], dtype=np.int64)
        counts = np.fromiter(num_scheduled_tokens.values(), dtype=np.int64, count=len(rows))
        starts = self.num_computed_tokens[rows].astype(np.int64)
        ends = starts + counts
        cu_seqlens = np.concatenate(([0], counts.cumsum()))
        # Token i of the step belongs to row_of[i], at positions[i]: a ragged arange.
        row_of = rows.repeat(counts)
        positions = np.arange(cu_seqlens[-1]) + (starts - cu_seqlens[:-1]).repeat(counts)
        blocks = self.block_tables[row_of, positions // self.block_size].astype(np.int64)
        max_blocks = -(-int(ends.max()) // self.block_size)

        def move(array: npt.NDArray[np.generic]) -> torch.Tensor:
            return torch.from_numpy(array).to(device, non_blocking=True)

        return ForwardBatch(
            input_ids=move(self.token_ids[row_of, positions]),
            positions=move(positions),
            slot_mapping=move(blocks * self.block_size + positions % self.block_size),
            block_tables=move(self.block_tables[rows, :max_blocks]),
            cu_seqlens_q=move(cu_seqlens.astype(np.int32)),
            seq_lens=move(ends.astype(np.int32)),
            kv_cache=kv_cache,
        )

    def samples(self, request_id: str, num_scheduled: int) -> bool:
        """Whether running `num_scheduled` tokens reaches the request's last known token."""
        row = self._row_of[request_id]
        return bool(self.num_computed_tokens[row] + num_scheduled == self.num_tokens[row])

    def sampling_input(self, request_id: str) -> SamplingInput:
        """Views of the request's ids, valid until the next change."""
        row = self._row_of[request_id]
        sampling = self._sampling[row]
        assert sampling is not None
        params, sample_index = sampling
        prompt_end = self.num_prompt_tokens[row]
        ids = self.token_ids[row]
        return SamplingInput(params, ids[:prompt_end], ids[prompt_end : self.num_tokens[row]], sample_index)

    def append_token(self, request_id: str, token_id: int) -> None:
        """A token this worker sampled: known from now on, computed in a later step."""
        row = self._row_of[request_id]
        self.token_ids[row, self.num_tokens[row]] = token_id
        self.num_tokens[row] += 1

    def _add(self, new: NewRequestData) -> None:
        self.remove(new.request_id)
        if not self._free_rows:
            raise RuntimeError(f"request {new.request_id}: all {len(self._sampling)} rows of the input batch are taken")
        num_prompt, num_generated = len(new.prompt_token_ids), len(new.generated_token_ids)
        if num_prompt + num_generated > self.max_model_len:
            raise RuntimeError(
                f"request {new.request_id} has {num_prompt + num_generated} tokens, over max_model_len={self.max_model_len}"
            )
        row = self._free_rows.pop()
        self._row_of[new.request_id] = row
        self.token_ids[row, :num_prompt] = new.prompt_token_ids
        self.token_ids[row, num_prompt : num_prompt + num_generated] = new.generated_token_ids
        self.num_prompt_tokens[row] = num_prompt
        self.num_tokens[row] = num_prompt + num_generated
        self.num_computed_tokens[row] = new.num_computed_tokens
        self.num_blocks[row] = 0
        self._append_blocks(row, new.block_ids)
        self._sampling[row] = (new.sampling_params, new.sample_index)

    def _update(self, cached: CachedRequestData) -> None:
        row = self._row_of.get(cached.request_id)
        if row is None:
            raise RuntimeError(f"request {cached.request_id} is scheduled as known, but this worker has never seen it")
        self.num_computed_tokens[row] = cached.num_computed_tokens
        self._append_blocks(row, cached.new_block_ids)

    def _append_blocks(self, row: int, block_ids: list[int]) -> None:
        start = self.num_blocks[row]
        self.block_tables[row, start : start + len(block_ids)] = block_ids
        self.num_blocks[row] += len(block_ids)
