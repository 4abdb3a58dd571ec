"""This folder runs on machines that have torch, triton, numpy and pytest, and nothing else."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
BENCHMARKS = FOLDER.parents[2] / "benchmarks" / "kernels"
OURS = {file.stem for folder in (FOLDER, BENCHMARKS) for file in folder.glob("*.py")} | {
    "baton_kernels"
}
THERE = {"torch", "triton", "numpy", "pytest"}


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.py")), ids=lambda file: file.name)
def test_imports_nothing_that_may_be_missing(file: Path) -> None:
    imported = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            imported.add(node.module.partition(".")[0])
    assert imported - OURS - THERE - sys.stdlib_module_names == set()
