"""Worker mirror: tracks what the worker has, so that a step carries only changes."""

from __future__ import annotations

from baton_engine.executor.step import BlockCopy, CachedRequestData, NewRequestData, SchedulerOutput
from baton_engine.scheduling.request import Request


class WorkerMirror:
    """Fills a step's requests. The only writer of `Request.worker`."""

    def __init__(self, *, send_token_ids: bool) -> None:
        """Start with a worker that has no sequence.

        Args:
            send_token_ids: some workers do not have the sampled tokens (pipeline stages), so the
                next step carries them.
        """
        self._send_token_ids = send_token_ids
        #: Sequences that the next step removes from the worker.
        self._forgotten_ids: list[str] = []

    def send(
        self,
        output: SchedulerOutput,
        sequence: Request,
        start: int,
        end: int,
        copies: list[BlockCopy] | None,
    ) -> None:
        """Add to a step what the worker lacks to run positions [start, end) of a sequence.

        Args:
            copies: copies of this step that replace blocks of the sequence.
        """
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
            state.num_tokens = len(sequence.token_ids) + sequence.num_placeholders
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
                )
            )
        state.num_blocks = len(blocks)

    def forget(self, sequence: Request) -> None:
        """Let the next step remove a sequence from the worker, if the worker has it."""
        if sequence.worker.is_known:
            self._forgotten_ids.append(sequence.request_id)
            sequence.worker.is_known = False

    def take_forgotten_ids(self) -> list[str]:
        """Return the sequences to remove since the last call."""
        forgotten_ids, self._forgotten_ids = self._forgotten_ids, []
        return forgotten_ids
