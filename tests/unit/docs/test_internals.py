"""The files, classes and functions that docs/internals names exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from baton_kv_transfer.consumer.load_state import LoadState, RankTransferState

ROOT = Path(__file__).parents[3]


PAGES = sorted((ROOT / "docs" / "internals").glob("*.md"))
PACKAGES = ("engine", "gateway", "kernels", "kv_transfer", "local", "operator")
SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
#: The text of a heading, of any level.
HEADING = re.compile(r"^#+ +(.*?)[ #]*$", re.MULTILINE)
CODE_BLOCK = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"[\w./-]+\.(?:py|h|cpp)")
#: A struct, class or function at the top level of a C++ file.
CPP_DEFINITION = re.compile(r"^(?:(?:struct|class) (\w+)|[A-Za-z][\w:&<> ]* (\w+)\()", re.MULTILINE)
#: A member of a class, or a private name.
NAME = re.compile(r"(_?[A-Z]\w*\.[a-z_]\w*|_[a-z]\w*)(?:\(\))?")


@cache
def sources() -> list[str]:
    """Return the paths of all source files, each with a slash before it."""
    return [
        f"/{path.relative_to(ROOT)}"
        for folder in (*PACKAGES, "benchmarks", "tests")
        for path in (ROOT / folder).rglob("*")
        if FILE.fullmatch(path.name)
    ]


@cache
def defined_in(path: Path) -> frozenset[str]:
    """Return the names that a Python or C++ file defines. A member's name is `Class.member`."""
    if path.suffix != ".py":
        return frozenset(
            name for names in CPP_DEFINITION.findall(path.read_text()) for name in names if name
        )
    return frozenset(_defined(ast.parse(path.read_text()).body))


def _defined(body: list[ast.stmt], owner: str = "") -> Iterator[str]:
    for statement in body:
        match statement:
            case ast.ClassDef(name=name):
                yield name
                yield from _defined(statement.body, f"{name}.")
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield owner + name
                if owner:
                    yield from (
                        owner + node.attr
                        for node in ast.walk(statement)
                        if isinstance(node, ast.Attribute)
                        and isinstance(node.ctx, ast.Store)
                        and isinstance(node.value, ast.Name)
                        and node.value.id == "self"
                    )
            case ast.Assign() | ast.AnnAssign():
                targets = (
                    statement.targets if isinstance(statement, ast.Assign) else [statement.target]
                )
                yield from (owner + each.id for each in targets if isinstance(each, ast.Name))


@cache
def members_and_private_names() -> frozenset[str]:
    """Return the members of all classes as `Class.member`, and all private names."""
    files = (path for folder in PACKAGES for path in (ROOT / folder).rglob("*.py"))
    members = {name for path in files for name in defined_in(path)}
    return frozenset(members | {name.rpartition(".")[2] for name in members})


def spans(page: Path) -> list[str]:
    return SPAN.findall(page.read_text())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_named_file_exists(page: Path) -> None:
    named = {span for span in spans(page) if FILE.fullmatch(span)}
    assert {each for each in named if not any(s.endswith(f"/{each}") for s in sources())} == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_named_member_and_private_name_exists(page: Path) -> None:
    named = {match[1] for span in spans(page) if (match := NAME.fullmatch(span))}
    assert named - members_and_private_names() == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_two_headings_of_a_page_have_the_same_text(page: Path) -> None:
    text = CODE_BLOCK.sub("", page.read_text())
    headings = [heading.casefold() for heading in HEADING.findall(text)]
    assert [each for each in headings if headings.count(each) > 1] == []


def index() -> Iterator[tuple[str, list[tuple[str, Path, list[str]]]]]:
    """Yield (heading, rows) of each table of where.md. A row is (behaviour, file, names)."""
    for section in (ROOT / "docs" / "internals" / "where.md").read_text().split("\n## ")[1:]:
        heading, *lines = section.splitlines()
        [folder] = SPAN.findall(heading)
        rows = []
        for line in [line for line in lines if line.startswith("|")][2:]:
            behaviour, file, names = (cell.strip() for cell in line.strip("|").split(" | "))
            [path] = SPAN.findall(file)
            inside = ROOT / folder / path
            rows.append(
                (behaviour, inside if inside.exists() else ROOT / path, SPAN.findall(names))
            )
        yield heading, rows


def test_every_row_of_the_index_names_what_its_file_defines() -> None:
    rows = [row for _, rows in index() for row in rows]
    assert len(rows) > 100
    wrong = {
        behaviour: names
        for behaviour, path, names in rows
        if not (names and path.is_file() and defined_in(path).issuperset(names))
    }
    assert wrong == {}


def test_the_tables_of_the_index_are_in_alphabetical_order() -> None:
    for heading, rows in index():
        behaviours = [behaviour.replace("`", "").lower() for behaviour, _, _ in rows]
        assert behaviours == sorted(behaviours), heading


def test_the_diagram_of_a_load_has_exactly_the_states_of_the_code() -> None:
    source = (ROOT / "docs" / "internals" / "diagrams" / "load.dot").read_text()
    boxes, _ = source.split("// Texts on the lines")
    states = [state.name for kind in (LoadState, RankTransferState) for state in kind]
    assert sorted(re.findall(r'label="([A-Z]+)\b', boxes)) == sorted(states)
