"""A scheduler's state with requests in chosen places, for tests that ask one part for decisions.

For the tests of admission, running requests, preemption and the lifecycle of requests.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

from baton_engine.kv_cache.kv_cache_manager import KVCacheManager
from baton_engine.scheduling.decisions import Decision
from baton_engine.scheduling.request import Request, RequestStatus
from baton_engine.scheduling.scheduler_state import SchedulerState
from baton_engine.scheduling.sequence_groups.beams import BeamSearches
from baton_protocol.engine_messages import (
    EngineCoreRequest,
    KVSide,
    KVTransferParams,
    PrefillResult,
)
from baton_protocol.options.config import SchedulerConfig
from baton_protocol.sampling_params import SamplingParams
from support.engine.scheduling.fake_runner import EOS
from support.engine.scheduling.scheduler_engine import BLOCK


class Place(enum.Enum):
    """Where a request is. All but WAITING and TO_LOAD have blocks for their tokens."""

    WAITING = enum.auto()
    TO_LOAD = enum.auto()
    LOADING = enum.auto()
    LOADED = enum.auto()
    RUNNING = enum.auto()
    SWAPPED = enum.auto()


class Spec(NamedTuple):
    """A request and its place.

    Requests whose names begin with the same letter have the same prompt, up to the shorter length.
    """

    place: Place
    name: str
    num_tokens: int = 8
    priority: int = 0
    #: Number of tokens that have KV. None: all.
    num_computed: int | None = None
    #: Number of tokens for which the request has no blocks yet.
    num_more_tokens: int = 0
    num_in_flight: int = 0
    #: A search that has blocks has this number of beams, which share the blocks of the prompt.
    beam_width: int = 0
    #: `BeamGroup.num_blocks_wanted`.
    num_blocks_wanted: int = 0
    group_id: str = ""
    #: Name of an earlier request whose blocks the request shares.
    shares: str = ""
    #: Whether a peer loads the request's KV.
    produces: bool = False
    prompt_logprobs: int | None = None


waiting = partial(Spec, Place.WAITING)
to_load = partial(Spec, Place.TO_LOAD)
loading = partial(Spec, Place.LOADING)
loaded = partial(Spec, Place.LOADED)
running = partial(Spec, Place.RUNNING)
swapped = partial(Spec, Place.SWAPPED)

#: A field of the samples of one prompt.
SAMPLE = {"group_id": "group"}


def fill_state(
    specs: Iterable[Spec],
    *,
    num_free: int | None = None,
    num_swap_blocks: int = 16,
    watermark_blocks: int = 0,
    max_num_seqs: int = 8,
    **options: Any,
) -> SchedulerState:
    """Return a state with 16 blocks of 4 tokens, and with these requests.

    Args:
        specs: in the order of arrival. Swapped samples of one group were swapped out together.
        num_free: number of free blocks. A transfer holds the others. None: no transfer.
        num_swap_blocks: number of blocks in host memory.
        watermark_blocks: see `SchedulerState`.
        max_num_seqs: places in the batch.
        **options: further fields of SchedulerConfig.
    """
    kv = KVCacheManager(16, BLOCK, "model", num_swap_blocks=num_swap_blocks)
    state = SchedulerState(
        SchedulerConfig(max_num_seqs=max_num_seqs, **options),
        kv,
        max_model_len=16 * BLOCK,
        eos_token_ids=[EOS],
        watermark_blocks=watermark_blocks,
    )
    specs = list(specs)
    for arrival, spec in enumerate(specs):
        _add(spec, arrival, state)
    _swap_out([spec for spec in specs if spec.place is Place.SWAPPED], state)
    for spec in specs:
        _place(spec, state.requests[spec.name], state)
    if num_free is not None:
        assert num_free <= kv.num_free_blocks, "the requests hold more blocks"
        kv.pool.allocate(kv.num_free_blocks - num_free)
    return state


def decided(decision: Decision | None) -> tuple[Any, ...] | None:
    """Return the type of a decision and the ids of its requests. None: there was no decision."""
    if decision is None:
        return None
    values = [each for value in decision for each in (value if type(value) is list else [value])]
    return (
        type(decision),
        *(value.request_id for value in values if isinstance(value, Request)),
    )


def _add(spec: Spec, arrival: int, state: SchedulerState) -> None:
    side = KVSide.PRODUCE if spec.produces else None
    if spec.place in (Place.TO_LOAD, Place.LOADING):
        side = KVSide.CONSUME
    request = Request(
        EngineCoreRequest(
            spec.name,
            [100 * ord(spec.name[0]) + position for position in range(spec.num_tokens)],
            SamplingParams(beam_width=spec.beam_width, prompt_logprobs=spec.prompt_logprobs),
            arrival_time=float(arrival),
            priority=spec.priority,
            kv_transfer=None if side is None else KVTransferParams(side, spec.name, "peer"),
        )
    )
    if spec.group_id:
        state.groups.join(spec.group_id, request)
    if spec.beam_width:
        BeamSearches(state).start(request)
        request.beams.num_blocks_wanted = spec.num_blocks_wanted
    state.requests[spec.name] = request


def _swap_out(specs: list[Spec], state: SchedulerState) -> None:
    units: dict[str, list[Request]] = {}
    for spec in specs:
        request = state.requests[spec.name]
        _compute(spec, request, state)
        request.status = RequestStatus.SWAPPED
        units.setdefault(spec.group_id or spec.name, []).append(request)
    for unit in units.values():
        sequences = [sequence for request in unit for sequence in request.sequences]
        assert state.kv.swap_out(sequences) is not None, "too few blocks in host memory"
        state.swapped.add(unit)


def _place(spec: Spec, request: Request, state: SchedulerState) -> None:
    if spec.place in (Place.LOADING, Place.LOADED, Place.RUNNING):
        _compute(spec, request, state)
    if spec.place is Place.WAITING:
        state.queues.waiting.push(request)
    elif spec.place is Place.TO_LOAD:
        request.status = RequestStatus.WAITING_FOR_REMOTE_KV
        state.queues.waiting_to_load.push(request)
    elif spec.place is Place.LOADING:
        request.status = RequestStatus.WAITING_FOR_REMOTE_KV
        state.queues.loading[spec.name] = request
    elif spec.place is Place.LOADED:
        request.prefill_result = PrefillResult(spec.name)
        state.queues.loaded.push(request)
    elif spec.place is Place.RUNNING:
        for sequence in [request, *request.sequences]:
            sequence.status = RequestStatus.RUNNING
        state.running.add(request)
        if request.group is not None and request.group.leader is None:
            request.group.leader = request


def _compute(spec: Spec, request: Request, state: SchedulerState) -> None:
    """Give a request blocks with the KV of its tokens, and a search all its beams."""
    sequence = request.sequences[0]
    if spec.shares:
        state.kv.fork(state.requests[spec.shares], sequence, spec.num_tokens)
    else:
        assert state.kv.allocate(sequence, spec.num_tokens), "too few blocks"
    computed = spec.num_tokens if spec.num_computed is None else spec.num_computed
    sequence.num_computed_tokens = computed
    state.kv.cache_blocks(sequence, computed)
    if request.beams is not None:
        candidates = range(EOS + 1, EOS + 1 + 2 * spec.beam_width)
        request.beams.live[0].candidates = [(token_id, -float(token_id)) for token_id in candidates]
        BeamSearches(state).advance(request)
    request.num_in_flight = spec.num_in_flight
    request.token_ids += [1] * spec.num_more_tokens
