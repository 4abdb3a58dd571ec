"""The kernel tests need only torch, triton, numpy and pytest, as on machines for `make gpu`."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
HELPERS = FOLDER.parents[1] / "support" / "kernels"
FILES = sorted([*FOLDER.rglob("*.py"), *HELPERS.glob("*.py")])
OURS = {"baton_kernels", "support.kernels"}
INSTALLED = {"torch", "triton", "numpy", "pytest"}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_kernel_test_imports_only_what_is_installed(file: Path) -> None:
    imported = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            parts = node.module.split(".")
            imported.add(".".join(parts[:2]) if parts[0] == "support" else parts[0])
    assert imported - OURS - INSTALLED - sys.stdlib_module_names == set()
