"""Every field of a struct that crosses a process boundary is written and read by product code."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

from baton_protocol import engine_messages, kv_compatibility, sampling_params, topology
from baton_protocol.process import health

ROOT = Path(__file__).parents[3]
FOLDERS = ("engine", "gateway", "kv_transfer", "local", "operator")

#: Structs and fields that a static search does not find, and why.
READ_ELSEWHERE = {
    "KVCompatibility": "`differences` reads all fields by name",
    # Subscribers of KV_EVENTS are clients of users.
    "KVEventBatch": "subscribers read it",
    "BlocksStored": "subscribers read it",
    "BlocksRemoved": "subscribers read it",
    # People read GET /topology.
    "MemberStatus.instance_id": "shown by GET /topology",
    "MemberStatus.num_running": "shown by GET /topology",
    "MemberStatus.num_waiting": "shown by GET /topology",
    "TopologyStatus.store": "shown by GET /topology",
}
WRITTEN_ELSEWHERE = {"SamplingParams": "the gateway converts the fields of a request by name"}


class Module:
    """The names, reads and writes in a module."""

    def __init__(self, text: str) -> None:
        nodes = list(ast.walk(ast.parse(text)))
        attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
        self.names = {node.id for node in nodes if isinstance(node, ast.Name)}
        self.reads = {node.attr for node in attributes if isinstance(node.ctx, ast.Load)}
        self.stores = {node.attr for node in attributes if isinstance(node.ctx, ast.Store)}
        self.calls = [
            (ast.unparse(node.func).rpartition(".")[2], node)
            for node in nodes
            if isinstance(node, ast.Call)
        ]

    def constructs(self, struct: str) -> bool:
        return any(called == struct for called, _ in self.calls)

    def writes(self, struct: str, fields: list[str]) -> set[str]:
        """Return the fields of `struct` that the module sets."""
        found = self.stores & set(fields)
        for called, node in self.calls:
            if called in (struct, "replace"):
                found |= {keyword.arg for keyword in node.keywords if keyword.arg}
            if called == struct:
                found |= set(fields[: len(node.args)])
        return found


class Search:
    """Finds the fields of structs that the code in `texts` does not read, or does not write.

    A module reads a field by a typed expression. If the type is not known, the module counts only
    if it names the struct and does not construct it.
    """

    def __init__(self, readers: ModuleType, texts: dict[str, str]) -> None:
        self._typed = readers.FieldReaders(texts)
        self._modules = {name: Module(text) for name, text in texts.items()}

    def is_read(self, struct: type[msgspec.Struct], field: str) -> bool:
        name = struct.__name__
        return any(self._typed.modules(each.__name__, field) for each in struct.__mro__) or any(
            name in module.names and field in module.reads and not module.constructs(name)
            for where, module in self._modules.items()
            if where != struct.__module__
        )

    def is_written(self, struct: type[msgspec.Struct], field: str) -> bool:
        fields = [each.name for each in msgspec.structs.fields(struct)]
        return any(
            field in module.writes(struct.__name__, fields) for module in self._modules.values()
        )


@pytest.fixture(scope="module")
def readers() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "hack"))
        yield importlib.import_module("field_readers")


@pytest.fixture(scope="module")
def search(readers: ModuleType) -> Search:
    return Search(readers, readers.read_modules(ROOT / folder for folder in FOLDERS))


def structs() -> list[type[msgspec.Struct]]:
    modules = (engine_messages, topology, health, kv_compatibility, sampling_params)
    return [
        value
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, type)
        and issubclass(value, msgspec.Struct)
        and value.__module__ == module.__name__
        and not name.startswith("_")
    ]


def fields(struct: type[msgspec.Struct]) -> set[str]:
    return {field.name for field in msgspec.structs.fields(struct)}


def listed(struct: type[msgspec.Struct], exceptions: dict[str, str]) -> set[str]:
    """Return the fields of `struct` that are in `exceptions`."""
    if struct.__name__ in exceptions:
        return fields(struct)
    return {field for field in fields(struct) if f"{struct.__name__}.{field}" in exceptions}


@pytest.mark.parametrize("struct", structs(), ids=lambda struct: struct.__name__)
def test_every_field_is_written_and_read(struct: type[msgspec.Struct], search: Search) -> None:
    unread = {field for field in fields(struct) if not search.is_read(struct, field)}
    unwritten = {field for field in fields(struct) if not search.is_written(struct, field)}
    assert unread - listed(struct, READ_ELSEWHERE) == set(), "remove these fields"
    assert unwritten - listed(struct, WRITTEN_ELSEWHERE) == set(), "remove these fields"
    for found, exceptions in ((unread, READ_ELSEWHERE), (unwritten, WRITTEN_ELSEWHERE)):
        assert bool(found) == bool(listed(struct, exceptions)), "shorten the list of exceptions"


def test_a_field_that_is_only_read_or_only_written_is_found(readers: ModuleType) -> None:
    code = {
        "writer": "def send(other):\n    return Ready(other.max_model_len, data_parallel_rank=1)",
        "reader": "def take(ready: Ready):\n    return ready.data_parallel_rank"
        " + ready.data_parallel_size",
    }
    found = Search(readers, code)
    assert [
        (
            field,
            found.is_written(engine_messages.Ready, field),
            found.is_read(engine_messages.Ready, field),
        )
        for field in ("max_model_len", "data_parallel_rank", "data_parallel_size")
    ] == [
        ("max_model_len", True, False),
        ("data_parallel_rank", True, True),
        ("data_parallel_size", False, True),
    ]
