"""The compilation of grammars: refused specifications, and reuse."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import threading
from concurrent.futures import Future
from pathlib import Path

import pytest

from baton_engine.grammar import structured_output
from baton_engine.grammar.compiler import NUM_THREADS
from baton_engine.grammar.structured_output import Grammar, StructuredOutputManager
from baton_protocol.sampling_params import StructuredOutput, StructuredOutputKind
from baton_text.tokenizer import Tokenizer
from support.engine.grammars import EOS, VOCAB_SIZE, allowed, compiled, refusal
from support.waiting import suspend


@pytest.mark.parametrize(
    ("kind", "spec", "reason"),
    [
        ("regex", "a(", "unclosed group"),
        ("json", '{"type": "strin"}', "strin"),
        ("json", '{"type": ', "Expecting value"),
        ("json", '{"$ref": "http://127.0.0.1:1/x"}', "not fetch"),
        ("json", "[" * 60_000, "recursion"),
        ("grammar", "start: missing", "missing"),
        ("grammar", "root ::= (", "Expected"),
        ("grammar", 'start: "' + '" "'.join("ab" * 100_000) + '"', "too big"),
    ],
)
def test_a_bad_specification_is_refused_with_the_reason(
    manager: StructuredOutputManager, kind: str, spec: str, reason: str
) -> None:
    message = refusal(manager, kind, spec)
    assert reason in message
    assert len(message) < 1000


@pytest.mark.parametrize(
    ("kind", "spec", "reason"),
    [
        (StructuredOutputKind.GRAMMAR, "start: start", "no text matches it"),
        (StructuredOutputKind.JSON, '{"$ref": "#"}', "no text matches it"),
        (StructuredOutputKind.REGEX, r"[^\x00-\x{10FFFF}]", "no text matches it"),
        (StructuredOutputKind.REGEX, ".*" * 2000, "lexer"),
    ],
)
def test_a_specification_that_no_text_matches_is_refused_at_compilation(
    manager: StructuredOutputManager, kind: StructuredOutputKind, spec: str, reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        manager.compile(StructuredOutput(kind, spec)).result(timeout=60)


def test_a_compiled_grammar_is_used_again_at_once_and_with_its_cache_salt_only(
    manager: StructuredOutputManager,
) -> None:
    """Compilations of other clients do not delay it. A hit of another salt would reveal it."""
    known = StructuredOutput(StructuredOutputKind.CHOICE, '["Alice", "Bob"]')
    manager.compile(known, "one").result(timeout=30)
    child = manager._trial._process
    assert child is not None
    suspend(child.pid)
    try:
        others = [
            manager.compile(StructuredOutput(StructuredOutputKind.REGEX, f"other {number}"), "two")
            for number in range(NUM_THREADS + 1)
        ]
        assert manager.compile(known, "one").done()
        others.append(manager.compile(known, "two"))
        assert not any(other.done() for other in others)
    finally:
        child.send_signal(signal.SIGCONT)
    for other in others:
        other.result(timeout=30)


def test_an_object_may_have_hundreds_of_optional_properties(
    manager: StructuredOutputManager, tokenizer: Tokenizer
) -> None:
    names = [f"property_{number}" for number in range(200)]
    schema = {"type": "object", "properties": {name: {"type": "integer"} for name in names}}
    grammar = compiled(manager, "json", json.dumps(schema | {"additionalProperties": False}))
    text = json.dumps({names[0]: 1, names[150]: 2})
    assert grammar.accept(tokenizer.encode(text, add_special_tokens=False)), grammar.error


def test_a_choice_can_have_thousands_of_strings(
    manager: StructuredOutputManager, tokenizer: Tokenizer
) -> None:
    spec = StructuredOutput(
        StructuredOutputKind.CHOICE, json.dumps([f"choice {number}" for number in range(5000)])
    )
    grammar = manager.compile(spec).result(timeout=60)
    assert grammar.accept(tokenizer.encode("choice 4321", add_special_tokens=False)), grammar.error


def test_a_missing_tokenizer_file_is_named_in_the_error(tmp_path: Path) -> None:
    manager = StructuredOutputManager(tmp_path, VOCAB_SIZE, EOS, lambda: None)
    assert f"{tmp_path / 'tokenizer.json'} does not exist" in refusal(manager, "json_object")


def test_an_unreadable_tokenizer_file_is_named_in_the_error(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    manager = StructuredOutputManager(tmp_path, VOCAB_SIZE, EOS, lambda: None)
    assert f"cannot use {tmp_path / 'tokenizer.json'}" in refusal(manager, "json_object")


def test_a_model_without_eos_is_refused(checkpoint: Path) -> None:
    assert "eos_token_id" in refusal(
        StructuredOutputManager(checkpoint, VOCAB_SIZE, [], lambda: None), "json_object"
    )


def test_the_end_of_a_compilation_wakes_the_engine(checkpoint: Path) -> None:
    woken = threading.Event()
    done_when_woken: list[bool] = []
    futures: list[Future[Grammar]] = []

    def wakeup() -> None:
        done_when_woken.append(all(future.done() for future in futures))
        woken.set()

    manager = StructuredOutputManager(checkpoint, VOCAB_SIZE, EOS, wakeup)
    futures.append(manager.compile(StructuredOutput(StructuredOutputKind.REGEX, "x+")))
    assert woken.wait(30), "the end of a compilation was not reported"
    assert done_when_woken == [True]
    woken.clear()
    bad = manager.compile(StructuredOutput(StructuredOutputKind.REGEX, "("))
    assert woken.wait(30), "the end of a failed compilation was not reported"
    assert bad.exception(timeout=30) is not None
    manager.shutdown()


def test_compilations_read_the_tokenizer_file_only_once(checkpoint: Path, tmp_path: Path) -> None:
    """The tokenizer file is read only once, so further specifications compile without it."""
    shutil.copy(checkpoint / "tokenizer.json", tmp_path / "tokenizer.json")
    manager = StructuredOutputManager(tmp_path, VOCAB_SIZE, EOS, lambda: None)
    compiled(manager, "regex", "[a-z]{1,9}")
    (tmp_path / "tokenizer.json").unlink()
    assert allowed(manager, compiled(manager, "regex", "[a-z]{1,9}"))
    assert allowed(manager, compiled(manager, "regex", "[0-9]"))


def test_the_grammar_library_is_not_imported_without_structured_requests(checkpoint: Path) -> None:
    code = (
        "import sys, pathlib\n"
        "from baton_engine.grammar.structured_output import StructuredOutputManager\n"
        f"path = pathlib.Path({str(checkpoint)!r})\n"
        "manager = StructuredOutputManager(path, 512, [2], lambda: None)\n"
        "manager.bitmask([]); manager.shutdown()\n"
        "assert 'llguidance' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_compiled_grammars_do_not_fill_the_memory(
    manager: StructuredOutputManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A regular expression of 2000 characters takes megabytes, and a longer schema takes less."""
    long_schema = json.dumps({"enum": [f"{number:08}" for number in range(1000)]})
    sizes = []
    for kind, spec in (("regex", "a?" * 1000), ("json", long_schema)):
        compiled(manager, kind, spec)
        sizes.append(list(manager._compiled.values())[-1][1])
    assert sizes[0] > 2**20 > 2 * sizes[1]
    monkeypatch.setattr(structured_output, "MAX_COMPILED_BYTES", 4 * sizes[0])
    for number in range(6):
        compiled(manager, "regex", "a?" * 1000 + str(number))
        kept = [text for _, _, text in manager._compiled]
        assert kept[-1].endswith(str(number))
        assert sum(size for _, size in manager._compiled.values()) <= 4 * sizes[0]
    assert 1 < len(kept) < 6
