"""What the application of decisions changes: status, queues, blocks and counters."""

from __future__ import annotations

from baton_engine.scheduling.handoff.remote_prefill import RemotePrefill
from baton_engine.scheduling.request import RequestStatus
from baton_engine.scheduling.request_lifecycle import RequestLifecycle
from baton_engine.scheduling.scheduler_state import SchedulerState
from baton_engine.scheduling.sequence_groups.beams import BeamSearches
from baton_engine.scheduling.step.builder import StepBuilder
from baton_protocol.engine_messages import EngineCoreEventType, EngineCoreOutput, FinishReason
from support.engine.scheduling.filled_state import (
    SAMPLE,
    Spec,
    fill_state,
    loaded,
    running,
    swapped,
    to_load,
    waiting,
)

NUM_BLOCKS = 16


def _lifecycle(*specs: Spec) -> tuple[RequestLifecycle, SchedulerState]:
    state = fill_state(specs)
    return RequestLifecycle(state, BeamSearches(state), RemotePrefill(state)), state


def _step(state: SchedulerState) -> StepBuilder:
    return StepBuilder(state.kv, state.worker, 0, 64)


def test_a_started_request_joins_the_batch_with_blocks_for_its_tokens() -> None:
    lifecycle, state = _lifecycle(waiting("a", num_tokens=9))
    request = state.requests["a"]
    lifecycle.start(_step(state), request, (), None)
    assert request.status is RequestStatus.RUNNING
    assert list(state.running.values()) == [request]
    assert request not in state.queues.waiting
    assert state.kv.num_free_blocks == NUM_BLOCKS - 3
    assert state.counters.prompt_tokens == 9
    assert [event.type for event in request.report.events] == [EngineCoreEventType.SCHEDULED]


def test_a_sample_that_shares_a_prompt_gets_only_its_own_block() -> None:
    lifecycle, state = _lifecycle(
        running("a", num_tokens=9, **SAMPLE), waiting("ab", num_tokens=9, **SAMPLE)
    )
    sample = state.requests["ab"]
    lifecycle.start(_step(state), sample, (), state.requests["a"])
    assert sample.num_computed_tokens == 8
    assert state.kv.num_free_blocks == NUM_BLOCKS - 3 - 1


def test_a_loading_request_leaves_the_queue_and_is_counted_once() -> None:
    lifecycle, state = _lifecycle(to_load("a"))
    request = state.requests["a"]
    lifecycle.start_load(request, [])
    assert request not in state.queues.waiting_to_load
    assert state.queues.loading == {"a": request}
    assert state.counters.prompt_tokens == 8
    lifecycle.compute_again(request)
    lifecycle.start(_step(state), request, (), None)
    assert state.counters.prompt_tokens == 8


def test_a_preempted_request_waits_without_blocks() -> None:
    for spec in (running("a"), loaded("a")):
        lifecycle, state = _lifecycle(spec)
        request = state.requests["a"]
        lifecycle.preempt(request)
        assert request.status is RequestStatus.WAITING
        assert (request.num_computed_tokens, request.num_preemptions) == (0, 1)
        assert state.kv.num_free_blocks == NUM_BLOCKS
        assert request not in state.running.values()
        assert request not in state.queues.loaded
        assert request in state.queues.waiting
        assert state.counters.num_preemptions == 1


def test_a_preempted_request_in_flight_is_queued_when_its_steps_return() -> None:
    lifecycle, state = _lifecycle(running("a", num_in_flight=1))
    request = state.requests["a"]
    lifecycle.preempt(request)
    assert request.status is RequestStatus.WAITING_FOR_STEPS
    assert request not in state.queues.waiting
    assert state.awaiting_steps == {"a": request}
    lifecycle.enqueue(request)
    assert request in state.queues.waiting
    assert not state.awaiting_steps


def test_a_swapped_request_returns_with_its_blocks_and_its_progress() -> None:
    lifecycle, state = _lifecycle(running("a"))
    request = state.requests["a"]
    step = _step(state)
    lifecycle.swap_out(step, [request])
    assert request.status is RequestStatus.SWAPPED
    assert len(step.output.swap_out) == state.counters.num_swapped_out_blocks == 2
    assert not list(state.running.values())
    step = _step(state)
    lifecycle.swap_in(step, [request])
    assert request.status is RequestStatus.RUNNING
    assert len(step.output.swap_in) == state.counters.num_swapped_in_blocks == 2
    assert request.num_computed_tokens == 8
    assert not state.swapped


def test_a_finished_request_leaves_no_trace_wherever_it_was() -> None:
    for spec in (waiting("a"), to_load("a"), loaded("a"), running("a"), swapped("a")):
        lifecycle, state = _lifecycle(spec)
        request = state.requests["a"]
        output = EngineCoreOutput("a", [], finish_reason=FinishReason.ABORT)
        lifecycle.finish(request, output)
        assert request.status is RequestStatus.FINISHED
        assert state.outputs.take() == [output]
        assert state.outputs.num_finished[FinishReason.ABORT] == 1
        assert not state.requests
        assert not state.swapped
        assert not list(state.running.values())
        for queue in (state.queues.waiting, state.queues.waiting_to_load, state.queues.loaded):
            assert request not in queue
        assert state.kv.num_free_blocks == state.kv.swap_pool.num_free_blocks == NUM_BLOCKS


def test_a_request_that_ends_during_its_load_keeps_its_blocks() -> None:
    lifecycle, state = _lifecycle(to_load("a"))
    request = state.requests["a"]
    lifecycle.start_load(request, [])
    lifecycle.finish(request, EngineCoreOutput("a", [], finish_reason=FinishReason.ABORT))
    assert state.handoff.num_held == 1
    assert state.kv.num_free_blocks < NUM_BLOCKS  # until the connector reports the end of the load
