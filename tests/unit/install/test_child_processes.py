"""No process imports modules from its working folder, which may be that of a checkpoint."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.images.dockerfile import ROOT

PRODUCT = ("engine", "gateway", "kernels", "kv_transfer", "local", "operator")


def module_commands(source: Path) -> Iterator[list[str]]:
    """Yield the arguments of each command that runs a module with this Python."""
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.List | ast.Tuple):
            arguments = [ast.unparse(item) for item in node.elts]
            if "sys.executable" in arguments and "'-m'" in arguments:
                yield arguments


COMMANDS = [
    pytest.param(command, id=f"{source.stem}-{number}")
    for package in PRODUCT
    for source in sorted((ROOT / package).rglob("*.py"))
    if "sys.executable" in source.read_text()
    for number, command in enumerate(module_commands(source))
]


def test_the_commands_are_found() -> None:
    assert len(COMMANDS) >= 9


@pytest.mark.parametrize("command", COMMANDS)
def test_a_module_is_run_without_the_working_folder_in_its_path(command: list[str]) -> None:
    """Without -P, `python -m` imports `msgspec` from a file msgspec.py in the working folder."""
    assert command[:3] == ["sys.executable", "'-P'", "'-m'"]
