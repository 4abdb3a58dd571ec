"""Runs beam searches on requests and KV blocks. `beam_search.advance` selects the beams."""

from __future__ import annotations

from baton_engine.scheduling.request import (
    BEAM_SEPARATOR,
    Beam,
    BeamGroup,
    Request,
    RequestStatus,
)
from baton_engine.scheduling.scheduler_state import SchedulerState
from baton_engine.scheduling.sequence_groups.beam_search import (
    BeamConfig,
    BeamState,
    FinishedBeam,
    FinishedBeams,
    advance,
)
from baton_protocol.engine_messages import (
    BeamOutput,
    EngineCoreRequest,
    FinishReason,
    TokenLogprobs,
)


class BeamSearches:
    """Starts, advances, restarts and ends beam searches."""

    def __init__(self, state: SchedulerState) -> None:
        self.kv = state.kv
        self.worker = state.worker
        self.max_model_len = state.max_model_len
        self.stop_rules = state.stop_rules

    def start(self, root: Request) -> None:
        """Start the beam search of `root`, with one beam that has the tokens of `root`."""
        params = root.sampling_params
        room = self.max_model_len - root.num_prompt_tokens
        stops = frozenset(params.stop_token_ids)
        config = BeamConfig(
            width=params.beam_width,
            max_tokens=min(params.max_tokens, room) if params.max_tokens is not None else room,
            stop_token_ids=stops if params.ignore_eos else stops | self.stop_rules.eos_token_ids,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
        )
        root.beams = BeamGroup(config, FinishedBeams(config.width))
        root.beams.live = [_new_beam(root, root.beams, root.token_ids)]

    def restart(self, root: Request) -> None:
        """Restart a preempted search from its prompt.

        The search is deterministic, so it produces the same beams, which share blocks again.
        """
        group = _group(root)
        self.give_up(root)
        group.finished = FinishedBeams(group.config.width)
        group.live = [_new_beam(root, group, root.token_ids)]

    def count_blocks_wanted(self, root: Request) -> None:
        """Record how many free blocks a preempted search needs to restart.

        The search needs the blocks that it holds now, and one more for each beam. With fewer
        blocks, the search would be preempted at the same point again. Call this method before the
        search's blocks are freed.
        """
        group = _group(root)
        own = {block.block_id for beam in group.live for block in beam.blocks}
        group.num_blocks_wanted = min(len(own) + len(group.live), self.kv.pool.num_blocks)

    def give_up(self, root: Request) -> None:
        """End all beams of a search and free their blocks."""
        group = _group(root)
        for beam in group.live:
            self._end(beam)
        group.live = []

    def report(self, beam: Request, logprobs: TokenLogprobs | None) -> None:
        """Store the candidates that a step has reported for the next token of a beam.

        Raises:
            RuntimeError: `logprobs` has no candidates.
        """
        assert isinstance(beam, Beam)
        if logprobs is None or not logprobs.top:
            raise RuntimeError(
                f"{beam!r}: the step returned no top tokens; "
                "a beam search needs 2 * beam_width of them"
            )
        beam.candidates = logprobs.top

    def advance(self, root: Request) -> None:
        """Advance a search by one token: replace the live beams by their best continuations.

        A continuation that ends is finished if it is among the best. If no live beam is left, the
        search is over.

        The first child of a parent continues the parent's sequence. Each additional child of this
        parent is a new sequence that shares the parent's blocks.
        """
        group = _group(root)
        parents = group.live
        step = advance(
            [BeamState(beam.cumulative_logprob, beam.num_generated_tokens) for beam in parents],
            [beam.candidates or [] for beam in parents],
            group.config,
            group.finished.scores,
        )
        for finished in step.finished:
            output = _output(root, parents[finished.parent], finished)
            group.finished.add(finished.score, output)
        children: list[Beam] = []
        reused: set[int] = set()
        for index, _, _ in step.live:  # fork before any parent changes
            if index in reused:
                children.append(self._fork(root, group, parents[index]))
            else:
                reused.add(index)
                children.append(parents[index])
        chosen = (
            [_chosen(root, parents[index], token_id) for index, token_id, _ in step.live]
            if root.sampling_params.logprobs is not None
            else []
        )
        for number, (child, (_, token_id, cumulative_logprob)) in enumerate(
            zip(children, step.live, strict=True)
        ):
            child.token_ids.append(token_id)
            child.cumulative_logprob = cumulative_logprob
            child.candidates = None
            if chosen:
                child.chosen.append(chosen[number])
        group.live = children
        for index, parent in enumerate(parents):
            if index not in reused:
                self._end(parent)

    def _fork(self, root: Request, group: BeamGroup, parent: Beam) -> Beam:
        child = _new_beam(root, group, parent.token_ids)
        self.kv.fork(parent, child, parent.num_computed_tokens)
        child.num_computed_tokens = parent.num_computed_tokens
        child.chosen = list(parent.chosen)
        child.status = RequestStatus.RUNNING
        return child

    def _end(self, beam: Beam) -> None:
        self.kv.free(beam)
        beam.status = RequestStatus.FINISHED
        self.worker.forget(beam)


def _group(root: Request) -> BeamGroup:
    assert root.beams is not None
    return root.beams


def _output(root: Request, parent: Beam, finished: FinishedBeam) -> BeamOutput:
    token_id, reason = finished.token_id, finished.finish_reason
    with_logprobs = root.sampling_params.logprobs is not None
    return BeamOutput(
        token_ids=[*parent.token_ids[root.num_arrival_tokens :], token_id],
        cumulative_logprob=finished.cumulative_logprob,
        score=finished.score,
        finish_reason=reason,
        stop_token_id=token_id if reason is FinishReason.STOP else None,
        logprobs=[*parent.chosen, _chosen(root, parent, token_id)] if with_logprobs else None,
    )


def _chosen(root: Request, parent: Beam, token_id: int) -> TokenLogprobs:
    candidates = parent.candidates or []
    rank = next(index for index, (candidate, _) in enumerate(candidates) if candidate == token_id)
    num_top = root.sampling_params.logprobs or 0
    return TokenLogprobs(token_id, candidates[rank][1], rank + 1, candidates[:num_top])


def _new_beam(root: Request, group: BeamGroup, token_ids: list[int]) -> Beam:
    number, group.num_started = group.num_started, group.num_started + 1
    num_prompt = root.num_prompt_tokens
    return Beam(
        EngineCoreRequest(
            request_id=f"{root.request_id}{BEAM_SEPARATOR}{number}",
            prompt_token_ids=token_ids[:num_prompt],
            sampling_params=root.sampling_params,
            generated_token_ids=token_ids[num_prompt:],
            sample_index=root.sample_index,
            cache_salt=root.cache_salt,
        ),
        root=root,
    )
