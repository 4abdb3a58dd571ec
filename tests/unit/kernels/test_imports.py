"""These tests run on machines that have torch, triton, numpy and pytest, and nothing else."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
HELPERS = FOLDER.parents[1] / "support" / "kernels"
FILES = sorted([*FOLDER.rglob("*.py"), *HELPERS.glob("*.py")])
OURS = {"baton_kernels", "support.kernels", "tuning"}
THERE = {"torch", "triton", "numpy", "pytest"}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_imports_nothing_that_may_be_missing(file: Path) -> None:
    imported = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            parts = node.module.split(".")
            imported.add(".".join(parts[:2]) if parts[0] == "support" else parts[0])
    assert imported - OURS - THERE - sys.stdlib_module_names == set()
