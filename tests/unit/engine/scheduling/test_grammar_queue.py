"""Requests wait for their grammar. A grammar that fails ends only its own request."""

from __future__ import annotations

import pytest

from baton_engine.scheduling.request_limits import RequestRefusedError
from baton_protocol.engine_messages import ErrorCode, FinishReason
from baton_protocol.sampling_params import (
    StructuredOutput,
    StructuredOutputKind,
)
from support.engine.scheduling.fake_runner import VOCAB_SIZE, next_token
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
