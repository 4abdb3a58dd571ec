"""A package's docstring lists all modules of its folder, and nothing else, or has no list."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PACKAGES = sorted(
    path.parent
    for folder in ("engine", "gateway", "kernels", "kv_transfer", "local", "operator")
    for path in (ROOT / folder).rglob("__init__.py")
)
#: The names of an item: "module  text", "module.py  text", "module: text", "- `a`, `b`: text".
ITEM = re.compile(
    r"^(?:- ((?:`\w+`, )*`\w+`):| *([a-z]\w*)(?:\.py|/)?(?:: | {2,})\S)", re.MULTILINE
)


def modules(package: Path) -> set[str]:
    """Return the names of the modules and packages in a package's folder."""
    files = {path.stem for path in package.glob("*.py") if not path.stem.startswith("__")}
    return files | {path.parent.name for path in package.glob("*/__init__.py")}


def listed(package: Path) -> set[str]:
    """Return the names that a package's docstring lists."""
    text = ast.get_docstring(ast.parse((package / "__init__.py").read_text())) or ""
    blocks = [
        {name for item in ITEM.findall(block) for name in re.findall(r"\w+", "".join(item))}
        for block in text.split("\n\n")
    ]
    # A block without any module is a table of something else.
    return set[str]().union(*(names for names in blocks if names & modules(package)))


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_package_lists_all_of_its_modules_or_none(package: Path) -> None:
    assert listed(package) in (set(), modules(package))


def test_most_packages_list_their_modules() -> None:
    assert len([package for package in PACKAGES if listed(package)]) > len(PACKAGES) / 2
