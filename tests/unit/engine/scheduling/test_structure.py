"""Structure of scheduling/: constructors take no callables, fields of requests have one writer."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path

import baton_engine.scheduling
from baton_engine.scheduling.request import Report, WorkerState
from support.structure import constructor_callables, read_folder, unannotated_parameters

FOLDER = Path(baton_engine.scheduling.__file__).parent


def test_no_constructor_in_scheduling_takes_a_callable() -> None:
    assert FOLDER / "scheduler.py" in FOLDER.rglob("*.py")
    assert list(constructor_callables(read_folder(FOLDER))) == []


def test_the_check_finds_callables_in_constructors_and_in_fields() -> None:
    source = """
class Planner:
    def __init__(
        self, kv: KV, *, finish: Callable[[Request], None], queue: list, clock: Clock
    ) -> None: ...
    def sort(self, key: Callable[[Request], int]) -> None: ...

class Rules(NamedTuple):
    stop: collections.abc.Callable[[Request], bool] | None
    length: int
"""
    aliases = "Clock = Callable[[], float]"
    assert list(constructor_callables([source, aliases])) == [
        ("Planner", "finish"),
        ("Planner", "clock"),
        ("Rules", "stop"),
    ]
    assert list(constructor_callables([source], allowed=["finish"])) == [("Rules", "stop")]


def test_every_parameter_of_a_constructor_in_scheduling_has_an_annotation() -> None:
    assert unannotated_parameters(read_folder(FOLDER)) == []
    assert unannotated_parameters(["class Queue:\n    def __init__(self, size): ..."]) == [
        ("Queue", "size")
    ]


WRITERS = {
    **{field.name: "request_outputs.py" for field in dataclasses.fields(Report)},
    **{f"worker.{field.name}": "worker_mirror.py" for field in dataclasses.fields(WorkerState)},
    **dict.fromkeys(
        ["blocks", "swapped_blocks", "block_hashes", "num_cached_blocks"], "kv_cache_manager.py"
    ),
    **dict.fromkeys(["num_placeholders", "num_in_flight"], "in_flight.py"),
    **dict.fromkeys(["num_preemptions", "started", "num_cached_tokens"], "request_lifecycle.py"),
    "request.status": "request_lifecycle.py",  # BeamSearches writes the status of beams
    **dict.fromkeys(["grammar", "num_grammar_tokens"], "grammar_queue.py"),
    **dict.fromkeys(["prefill_result", "kv_transfer"], "remote_prefill.py"),
    **dict.fromkeys(["request.group", "order"], "samples.py"),
    "root.beams": "beams.py",
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
