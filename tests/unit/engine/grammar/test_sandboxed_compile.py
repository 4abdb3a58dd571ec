"""The child process that compiles a grammar first."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from baton_engine.grammar import sandboxed_compile
from baton_engine.grammar.structured_output import StructuredOutputManager
from support.engine.grammars import EOS, VOCAB_SIZE, compiled, refusal
from support.waiting import suspend


@pytest.mark.parametrize(
    ("kind", "spec"),
    [
        ("json", json.dumps({"enum": [-(2**63)]})),  # recurses without end
        (
            "grammar",
            "start: a0\n" + "".join(f"a{n}: a{n + 1}\n" for n in range(9000)) + 'a9000: "x"',
        ),
        ("regex", "a?" * 30_000),  # would take gigabytes
    ],
)
def test_a_specification_that_crashes_the_compiler_is_refused_and_later_ones_work(
    manager: StructuredOutputManager, kind: str, spec: str
) -> None:
    assert "too complex" in refusal(manager, kind, spec)
    compiled(manager, "regex", f"after {kind}")


def test_the_child_imports_nothing_from_the_working_folder(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The working folder may be the folder of a checkpoint."""
    for name in ("llguidance", "msgspec", "resource"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported')")
    monkeypatch.chdir(tmp_path)
    manager = StructuredOutputManager(checkpoint, VOCAB_SIZE, EOS, lambda: None)
    compiled(manager, "regex", "ab")
    manager.shutdown()


def test_a_child_that_does_not_answer_is_ended_and_later_specifications_work(
    manager: StructuredOutputManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled(manager, "regex", "before the child is frozen")
    child = manager._trial._process
    assert child is not None
    monkeypatch.setattr(sandboxed_compile, "MAX_WALL_S", 0.2)
    suspend(child.pid)
    assert "too complex" in refusal(manager, "regex", "while it is frozen")
    monkeypatch.undo()
    compiled(manager, "regex", "after it was replaced")
