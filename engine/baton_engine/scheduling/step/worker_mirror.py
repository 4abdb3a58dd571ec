"""Tracks the request data that the worker already has, so that a step carries only changes."""

from __future__ import annotations

from baton_engine.executor.step import BlockCopy, CachedRequestData, NewRequestData, SchedulerOutput
from baton_engine.scheduling.request import Request
from baton_engine.scheduling.step.in_flight import ScheduledRange


class WorkerMirror:
    """Adds to each step the request data that the worker lacks. Sole writer of `Request.worker`."""

    def __init__(self, *, send_token_ids: bool) -> None:
        """Create the mirror of a worker that has no sequences.

        Args:
            send_token_ids: send sampled tokens to the workers with the next step. Pipeline stages
                need this, because only the last stage samples.
        """
        self._send_token_ids = send_token_ids
        #: Sequences that the next step removes from the worker.
        self._forgotten_ids: list[str] = []

    def send(
        self, output: SchedulerOutput, entry: ScheduledRange, copies: list[BlockCopy] | None
    ) -> None:
        """Add to `output` the data that the worker needs to run a range.

        Args:
            copies: block copies that the step makes for this sequence. In the sequence's block
                table, the worker replaces the source of each copy by the target.
        """
        sequence, start, end, samples, _ = entry
        state, blocks = sequence.worker, sequence.blocks
        if state.is_known:
            new_block_ids: list[int] = []
            if state.num_blocks < len(blocks):
                new_block_ids = [block.block_id for block in blocks[state.num_blocks :]]
            cached = CachedRequestData(sequence.request_id, new_block_ids, start)
            if copies:
                cached.replaced_blocks = copies
            if end > state.num_tokens and (self._send_token_ids or sequence.root is not None):
                cached.new_token_ids = sequence.token_ids[start:end]
            output.cached_requests.append(cached)
        else:
            state.is_known = True
            # Without the token that this step samples.
            state.num_tokens = sequence.num_expected_tokens - samples
            num_prompt = sequence.num_prompt_tokens
            output.new_requests.append(
                NewRequestData(
                    request_id=sequence.request_id,
                    prompt_token_ids=sequence.token_ids[:num_prompt],
                    generated_token_ids=sequence.token_ids[num_prompt:],
                    sampling_params=sequence.sampling_params,
                    sample_index=sequence.sample_index,
                    block_ids=sequence.block_ids,
                    num_computed_tokens=start,
                    pooling_params=sequence.pooling_params,
                )
            )
        state.num_blocks = len(blocks)

    def forget(self, sequence: Request) -> None:
        """Make the next step remove a sequence from the worker, if the worker has the sequence."""
        if sequence.worker.is_known:
            self._forgotten_ids.append(sequence.request_id)
            sequence.worker.is_known = False

    def take_forgotten_ids(self) -> list[str]:
        """Return the ids of the sequences that the worker must remove, and clear the list."""
        forgotten_ids, self._forgotten_ids = self._forgotten_ids, []
        return forgotten_ids
