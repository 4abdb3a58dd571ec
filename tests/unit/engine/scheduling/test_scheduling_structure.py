"""Structure of scheduling/: constructors take no callables, fields of requests have one writer."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path

import baton_engine.scheduling
from baton_engine.scheduling.request import Report, WorkerState

FOLDER = Path(baton_engine.scheduling.__file__).parent


def callables(source: str) -> list[str]:
    """Return the constructor parameters and fields in `source` that are annotated as callables."""
    found = []
    for owner in ast.walk(ast.parse(source)):
        if not isinstance(owner, ast.ClassDef):
            continue
        constructors = [
            node
            for node in owner.body
            if isinstance(node, ast.FunctionDef) and node.name == "__init__"
        ]
        given: list[tuple[str, ast.expr | None]] = [
            (argument.arg, argument.annotation)
            for constructor in constructors
            for argument in [
                *constructor.args.posonlyargs,
                *constructor.args.args,
                *constructor.args.kwonlyargs,
            ]
        ]
        given += [
            (ast.unparse(field.target), field.annotation)
            for field in owner.body
            if isinstance(field, ast.AnnAssign)
        ]
        found += [
            f"{owner.name}.{name}"
            for name, annotation in given
            if annotation is not None and "Callable" in ast.unparse(annotation)
        ]
    return found


def test_no_constructor_in_scheduling_takes_a_callable() -> None:
    files = sorted(FOLDER.rglob("*.py"))
    assert FOLDER / "scheduler.py" in files
    assert {file.name: found for file in files if (found := callables(file.read_text()))} == {}


def test_the_check_finds_callables_in_constructors_and_in_fields() -> None:
    source = """
class Planner:
    def __init__(self, kv: KV, *, finish: Callable[[Request], None], queue: list) -> None: ...
    def sort(self, key: Callable[[Request], int]) -> None: ...

class Rules(NamedTuple):
    stop: collections.abc.Callable[[Request], bool] | None
    length: int
"""
    assert callables(source) == ["Planner.finish", "Rules.stop"]


def test_every_parameter_of_a_constructor_in_scheduling_has_an_annotation() -> None:
    for file in FOLDER.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name == "__init__":
                arguments = [*node.args.args[1:], *node.args.kwonlyargs]
                assert all(argument.annotation is not None for argument in arguments), (
                    f"{file.name}: {node.lineno}"
                )


WRITERS = {
    **{field.name: "request_outputs.py" for field in dataclasses.fields(Report)},
    **{f"worker.{field.name}": "worker_mirror.py" for field in dataclasses.fields(WorkerState)},
    **dict.fromkeys(
        ["blocks", "swapped_blocks", "block_hashes", "num_cached_blocks"], "manager.py"
    ),
    **dict.fromkeys(["num_placeholders", "num_in_flight"], "in_flight.py"),
}


def assigned_fields(source: str) -> set[str]:
    """Return the attributes that `source` assigns, as `field` and as `owner.field`.

    Attributes of `self` are left out.
    """
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            owner = ast.unparse(node.value).split(".")[-1]
            if owner not in ("self", "output"):
                names |= {node.attr, f"{owner}.{node.attr}"}
    return names


def test_each_field_of_a_request_has_one_writer() -> None:
    for file in [*FOLDER.rglob("*.py"), *(FOLDER.parent / "kv_cache").glob("*.py")]:
        others = {name for name, writer in WRITERS.items() if writer != file.name}
        assert assigned_fields(file.read_text()) & others == set(), file.name


def test_the_check_finds_assignments_to_fields() -> None:
    source = """
request.blocks[0] = b
sequence.worker.is_known = True
request.num_cached_blocks += 1
self.events = []
"""
    assert {"worker.is_known", "num_cached_blocks"} <= assigned_fields(source)
    assert "events" not in assigned_fields(source)
