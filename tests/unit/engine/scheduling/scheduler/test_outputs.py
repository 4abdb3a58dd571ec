"""Grammars, pauses, resets, and the fields of outputs other than tokens."""

from __future__ import annotations

import copy

import pytest

from baton_engine.scheduling.request_limits import RequestRefusedError
from baton_engine.scheduling.scheduler_state import PauseState
from baton_protocol.engine_messages import EngineCoreEventType, ErrorCode, FinishReason
from baton_protocol.sampling_params import (
    RepetitionDetection,
    StructuredOutput,
    StructuredOutputKind,
)
from support.engine.scheduling.fake_runner import VOCAB_SIZE, continuation, next_token
from support.engine.scheduling.scheduler_engine import Engine
from support.engine.scheduling.scheduler_machine import FakeGrammars


def grammar(spec: str) -> dict[str, object]:
    return {"structured_output": StructuredOutput(StructuredOutputKind.REGEX, spec)}


def even(prompt: list[int], num_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        token = next_token(tokens)
        tokens.append((token + token % 2) % VOCAB_SIZE)
    return tokens[len(prompt) :]


def test_requests_wait_for_their_grammar_without_blocking_others() -> None:
    grammars = FakeGrammars()
    engine = Engine(grammars=grammars, max_num_seqs=1)
    engine.add("json", [1, 2], 9, grammar("3"), cache_salt="client")
    engine.add("text", [3], 2)
    engine.run()
    assert engine.outputs.keys() == {"text"}
    assert grammars.cache_salts == ["client"]
    grammars.compile_one()
    engine.run()
    assert engine.text("json") == even([1, 2], 3)
    assert engine.last("json").finish_reason is FinishReason.STOP, "the grammar is complete"
    assert engine.last("json").stop_token_id is None


def test_a_grammar_that_cannot_continue_ends_its_request_as_invalid() -> None:
    grammars = FakeGrammars()
    engine = Engine(grammars=grammars)
    engine.add("big", [1, 2], 9, grammar("5"))
    grammars.compile_one()
    engine.step()
    request = engine.scheduler.state.requests["big"]
    request.grammar.error = "too many states"
    engine.run()
    last = engine.last("big")
    assert (last.finish_reason, last.error_code) == (FinishReason.ERROR, ErrorCode.INVALID)
    assert last.error == "structured_output cannot continue: too many states"


def test_a_grammar_accepts_the_generated_tokens_of_a_continued_request() -> None:
    grammars = FakeGrammars()
    engine = Engine(grammars=grammars)
    known = even([1, 2], 2)
    engine.add("good", [1, 2], 9, grammar("5"), generated_token_ids=known)
    engine.add("bad", [1, 2], 9, grammar("5"), generated_token_ids=[known[0], 3])
    engine.add("done", [1, 2], 9, grammar("2"), generated_token_ids=known)
    for _ in range(3):
        grammars.compile_one()
    engine.run()
    assert [*known, *engine.text("good")] == even([1, 2], 5)
    assert (engine.last("bad").error_code, engine.last("done").finish_reason) == (
        ErrorCode.INVALID,
        FinishReason.STOP,
    )


def test_a_grammar_that_does_not_compile_ends_its_request_with_the_reason() -> None:
    grammars = FakeGrammars()
    engine = Engine(grammars=grammars)
    engine.add("r", [1, 2], 9, grammar("bad"))
    grammars.compile_one()
    engine.run()
    output = engine.last("r")
    assert (output.finish_reason, output.error_code) == (FinishReason.ERROR, ErrorCode.INVALID)
    assert output.error == "no such grammar"
    with pytest.raises(RequestRefusedError, match="structured_output is not available"):
        Engine().add("r", [1, 2], 9, grammar("3"))


def test_stats_do_not_change_after_they_were_returned() -> None:
    engine = Engine()
    engine.add("r", [1, 2], 6)
    engine.step()
    stats = engine.scheduler.stats()
    before = copy.deepcopy(stats)
    engine.run()
    assert stats == before
    assert engine.scheduler.stats().generation_tokens > before.generation_tokens


def test_paused_new_admits_no_requests_and_paused_all_runs_none() -> None:
    engine = Engine()
    engine.add("a", [1], 6)
    engine.step()
    engine.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    engine.add("b", [2], 6)
    assert engine.step().num_scheduled_tokens == {"a": 1}
    engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    assert not engine.step().num_scheduled_tokens
    assert not engine.scheduler.made_progress
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    engine.run()
    assert engine.text("a") == continuation([1], 6, ignore_eos=True)
    assert engine.text("b") == continuation([2], 6, ignore_eos=True)


def test_preempt_all_frees_all_kv_and_loses_no_text() -> None:
    engine = Engine(num_swap_blocks=8)
    engine.add("a", [1, 2, 3], 6)
    engine.add("beams", [4, 5], 6, {"beam_width": 2})
    for _ in range(3):
        engine.step()
    engine.scheduler.preempt_all()
    assert engine.kv.usage == 0
    engine.run()
    assert engine.text("a") == continuation([1, 2, 3], 6, ignore_eos=True)


@pytest.mark.parametrize("reset_running", [False, True])
def test_a_reset_of_the_prefix_cache_can_include_running_requests(reset_running) -> None:
    engine = Engine()
    engine.add("a", list(range(1, 10)), 6)
    engine.step()
    engine.scheduler.reset_prefix_cache(reset_running)
    assert (engine.kv.usage == 0) == reset_running
    engine.add("b", list(range(1, 10)), 2)
    engine.run()
    assert engine.outputs["b"][0].num_cached_tokens == 0
    assert engine.text("a") == continuation(list(range(1, 10)), 6, ignore_eos=True)


def test_a_repetitive_output_ends_its_request() -> None:
    engine = Engine()
    engine.add("r", [1], 9, {"repetition_detection": RepetitionDetection(1, 1, 3)})
    token = continuation([1], 1, ignore_eos=True)[0]
    step, ran = engine.scheduler.schedule(), engine.runner
    for count in range(3):
        result = ran.execute_model(step)
        result.sampled_token_ids["r"] = ran.sequences["r"].token_ids[-1] = token
        (output,) = engine.scheduler.update_from_output(step, result)
        assert output.finish_reason is (FinishReason.REPETITION if count == 2 else None)
        step = engine.scheduler.schedule()


def test_events_are_sent_with_the_next_output() -> None:
    engine = Engine()
    engine.add("r", [1, 2], 4)
    engine.step()
    engine.scheduler.preempt_all()
    engine.run()
    first, second, *others = engine.outputs["r"]
    assert [event.type for event in first.events or []] == [
        EngineCoreEventType.QUEUED,
        EngineCoreEventType.SCHEDULED,
    ]
    assert [event.type for event in second.events or []] == [
        EngineCoreEventType.PREEMPTED,
        EngineCoreEventType.SCHEDULED,
    ]
    times = [event.timestamp for output in (first, second) for event in output.events or []]
    assert times == sorted(times)
    assert not any(output.events for output in others)


@pytest.mark.parametrize("preempt_after", [None, 1, 2])
def test_prompt_logprobs_are_sent_in_full_with_the_first_token(preempt_after) -> None:
    engine = Engine(budget=4)
    prompt = list(range(1, 11))
    engine.add("fills the cache", prompt, 1)
    engine.run()
    engine.add("r", prompt, 3, {"prompt_logprobs": 0})
    for step in range(1, 4):
        engine.step()
        if step == preempt_after:
            engine.scheduler.preempt_all()
    engine.run()
    first, *others = engine.outputs["r"]
    assert [entry.token_id for entry in first.prompt_logprobs or []] == prompt[1:]
    assert first.num_cached_tokens == 0
    assert not any(output.prompt_logprobs for output in others)


def test_outputs_carry_routed_experts_and_nan_counts() -> None:
    engine = Engine(budget=4)
    engine.add("r", list(range(1, 11)), 2, {"return_routed_experts": True})
    engine.run()
    first, second = engine.outputs["r"]
    assert first.routed_experts.shape == (10, 1, 1)
    assert list(first.routed_experts.expert_ids[::2]) == list(range(10)), (
        "the experts of all chunks in order"
    )
    assert second.routed_experts.shape == (1, 1, 1)
    engine.add("n", [1], 1)
    step = engine.scheduler.schedule()
    result = engine.runner.execute_model(step)
    result.num_nans_in_logits["n"] = 7
    (output,) = engine.scheduler.update_from_output(step, result)
    assert output.num_nans_in_logits == 7


def test_a_crash_of_a_grammar_compilation_ends_only_its_request(
    caplog: pytest.LogCaptureFixture,
) -> None:
    grammars = FakeGrammars()
    engine = Engine(grammars=grammars)
    engine.add("r", [1, 2], params=grammar("3"))
    engine.add("other", [1, 2])
    grammars.pending.pop()[1].set_exception(BaseException("a panic of the parser"))
    engine.run()
    assert engine.last("r").error_code is ErrorCode.INVALID
    assert engine.last("r").error == (
        "structured_output cannot be compiled; the engine's log has the reason under the id r"
    )
    assert "request r ends with an error" in caplog.text
    assert "BaseException: a panic of the parser" in caplog.text
    assert len(engine.text("other")) == 4


def test_the_grammar_compilation_of_an_aborted_request_is_cancelled() -> None:
    grammars = FakeGrammars()
    engine = Engine(grammars=grammars)
    engine.add("r", [1, 2], params=grammar("3"))
    engine.scheduler.abort_requests(["r"])
    assert grammars.pending[0][1].cancelled()
    engine.run()
    assert not engine.scheduler.has_work
