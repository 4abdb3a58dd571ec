"""The beams of one beam search: sequences that share blocks, run side by side and wait for each other after every token.

The search itself is `beam_search.advance`; here its decisions become requests and blocks.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable

from baton_engine.core.beam_search import BeamConfig, BeamState, FinishedBeams, advance
from baton_engine.core.kv_cache_manager import KVCacheManager
from baton_engine.core.request import Request, RequestStatus
from baton_engine.protocol.messages import BeamOutput, EngineCoreRequest, FinishReason, TokenLogprobs

_SEPARATOR = "#"


def root_id(request_id: str) -> str:
    """Id of the search that a sequence with this id would be a beam of; empty if it could be none."""
    root, separator, number = request_id.rpartition(_SEPARATOR)
    return root if separator and number.isdecimal() else ""


class Beam(Request):
    """One sequence; its id is `<request id>#<number>`."""

    def __init__(self, core_request: EngineCoreRequest, *, root: Request) -> None:
        super().__init__(core_request, root=root)
        self.cumulative_logprob = 0.0
        self.chosen: list[TokenLogprobs] = []
        """Of the tokens generated here."""
        self.candidates: list[tuple[int, float]] | None = None
        """(token id, log-probability), best first, once it has run; it waits until all beams have theirs."""


class BeamGroup:
    def __init__(self, root: Request, eos_token_ids: frozenset[int], max_model_len: int) -> None:
        params = root.sampling_params
        room = max_model_len - root.num_prompt_tokens
        stops = frozenset(params.stop_token_ids)
        self._root = root
        self._config = BeamConfig(
            width=params.beam_width,
            max_tokens=min(params.max_tokens, room) if params.max_tokens is not None else room,
            stop_token_ids=stops if params.ignore_eos else stops | eos_token_ids,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
        )
        self._numbers = itertools.count()
        self.live: list[Beam] = []
        self._finished: FinishedBeams[BeamOutput]
        self.num_blocks_wanted = 0
        """Once it was preempted: with fewer it would come to the same point, and be preempted there again."""
        self.restart()

    def restart(self) -> None:
        """Back to the prompt: a search without its KV is repeated. It is deterministic, and its beams share blocks again.

        The beams so far must have been given up, see `give_up`.
        """
        self.live = [self._new_beam(self._root.token_ids)]
        self._finished = FinishedBeams(self._config.width)

    def count_blocks_wanted(self, num_blocks: int) -> None:
        """It is preempted, by recompute: it wants what it has, and a block more for each beam.

        Args:
            num_blocks: that there are in all.
        """
        own = {block.block_id for beam in self.live for block in beam.blocks}
        self.num_blocks_wanted = min(len(own) + len(self.live), num_blocks)

    def give_up(self, kv: KVCacheManager) -> list[str]:
        """Ends all beams and frees their blocks. Returns the ids that the worker is to forget."""
        forgotten = [request_id for beam in self.live for request_id in _end(beam, kv)]
        self.live = []
        return forgotten

    def report(self, beam: Request, logprobs: TokenLogprobs | None) -> None:
        """A beam has run. Raises RuntimeError if the step brought no candidates for it."""
        assert isinstance(beam, Beam)
        if logprobs is None or not logprobs.top:
            raise RuntimeError(f"{beam!r}: the step brought no top tokens; a beam search needs 2 * beam_width of them")
        beam.num_placeholders = 0
        beam.candidates = logprobs.top

    @property
    def complete(self) -> bool:
        """Whether all live beams have their candidates."""
        return all(beam.candidates is not None for beam in self.live)

    def advance(self, kv: KVCacheManager) -> list[str]:
        """One step of the search: children share their parents' blocks, the first child takes the parent's place.

        Returns:
            Ids that the worker is to forget. The search is over if no beam lives on.
        """
        parents = self.live
        step = advance(
            [BeamState(beam.cumulative_logprob, beam.num_generated_tokens) for beam in parents],
            [beam.candidates or [] for beam in parents],
            self._config,
            self._finished.scores,
        )
        for finished in step.finished:
            parent = parents[finished.parent]
            self._finished.add(
                finished.score,
                BeamOutput(
                    token_ids=[*parent.token_ids[self._root.num_arrival_tokens :], finished.token_id],
                    cumulative_logprob=finished.cumulative_logprob,
                    score=finished.score,
                    finish_reason=finished.finish_reason,
                    stop_token_id=finished.token_id if finished.finish_reason is FinishReason.STOP else None,
                    logprobs=[*parent.chosen, self._chosen(parent, finished.token_id)] if self._reports else None,
                ),
            )
        children: list[Beam] = []
        reused: set[int] = set()
        for index, _, _ in step.live:  # before any parent changes
            if index in reused:
                children.append(self._fork(parents[index], kv))
            else:
                reused.add(index)
                children.append(parents[index])
        chosen = [self._chosen(parents[index], token_id) for index, token_id, _ in step.live] if self._reports else []
        for number, (child, (_, token_id, cumulative_logprob)) in enumerate(zip(children, step.live, strict=True)):
            child.token_ids.append(token_id)
            child.cumulative_logprob = cumulative_logprob
            child.candidates = None
            if chosen:
                child.chosen.append(chosen[number])
        self.live = children
        return [
            request_id for index, parent in enumerate(parents) if index not in reused for request_id in _end(parent, kv)
        ]

    def num_blocks_needed(self, beams: Iterable[Request], block_size: int) -> int:
        """Blocks that one more token for each of `beams` takes: new ones, and copies of those that others hold."""
        num_blocks = 0
        writers: Counter[int] = Counter()
        holders: dict[int, int] = {}
        for beam in beams:
            slot = beam.num_computed_tokens // block_size
            if slot >= len(beam.blocks):
                num_blocks += 1
            else:
                block = beam.blocks[slot]
                writers[block.block_id] += 1
                holders[block.block_id] = block.ref_count
        # The last one to hold a block writes in place.
        return num_blocks + sum(min(count, holders[block_id] - 1) for block_id, count in writers.items())

    def results(self) -> list[BeamOutput]:
        """Finished hypotheses, best first."""
        return list(self._finished)

    @property
    def _reports(self) -> bool:
        return self._root.sampling_params.logprobs is not None

    def _chosen(self, parent: Beam, token_id: int) -> TokenLogprobs:
        candidates = parent.candidates or []
        rank = next(index for index, (candidate, _) in enumerate(candidates) if candidate == token_id)
        num_top = self._root.sampling_params.logprobs or 0
        return TokenLogprobs(token_id, candidates[rank][1], rank + 1, candidates[:num_top])

    def _fork(self, parent: Beam, kv: KVCacheManager) -> Beam:
        child = self._new_beam(parent.token_ids)
        kv.fork(parent, child, parent.num_computed_tokens)
        child.num_computed_tokens = parent.num_computed_tokens
        child.chosen = list(parent.chosen)
        child.status = RequestStatus.RUNNING
        return child

    def _new_beam(self, token_ids: list[int]) -> Beam:
        root = self._root
        num_prompt = root.num_prompt_tokens
        return Beam(
            EngineCoreRequest(
                request_id=f"{root.request_id}{_SEPARATOR}{next(self._numbers)}",
                prompt_token_ids=token_ids[:num_prompt],
                sampling_params=root.sampling_params,
                generated_token_ids=token_ids[num_prompt:],
                sample_index=root.sample_index,
                cache_salt=root.cache_salt,
                lora_name=root.lora_name,
            ),
            root=root,
        )


def _end(beam: Beam, kv: KVCacheManager) -> list[str]:
    kv.free(beam)
    beam.status = RequestStatus.FINISHED
    return [beam.request_id] if beam.in_worker else []
