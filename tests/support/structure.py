"""Checks of the structure of source files.

For the tests of the structure of the scheduler and the KV transfer.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path


def constructor_callables(
    sources: Iterable[str], allowed: Iterable[str] = ()
) -> Iterator[tuple[str, str]]:
    """Yield the constructor parameters and fields that are annotated as callables.

    An annotation can also name an alias of a callable type that one of the sources defines.

    Args:
        sources: the text of each file.
        allowed: names of parameters that may be callables.

    Yields:
        The class, and the parameter or field.
    """
    trees = [ast.parse(source) for source in sources]
    types = {"Callable"} | {
        ast.unparse(node.targets[0])
        for tree in trees
        for node in tree.body
        if isinstance(node, ast.Assign) and "Callable" in _names(node.value)
    }
    for owner, name, annotation in _fields(trees):
        if annotation is not None and types & _names(annotation) and name not in allowed:
            yield owner, name


def unannotated_parameters(sources: Iterable[str]) -> list[tuple[str, str]]:
    """Return the class and the name of each constructor parameter without an annotation."""
    fields = _fields([ast.parse(source) for source in sources])
    return [(owner, name) for owner, name, annotation in fields if annotation is None]


def read_folder(folder: Path) -> list[str]:
    return [file.read_text() for file in sorted(folder.rglob("*.py"))]


def _names(node: ast.AST) -> set[str]:
    return {
        child.id if isinstance(child, ast.Name) else child.attr
        for child in ast.walk(node)
        if isinstance(child, ast.Name | ast.Attribute)
    }


def _fields(trees: list[ast.Module]) -> Iterator[tuple[str, str, ast.expr | None]]:
    """Yield the class, name and annotation of each constructor parameter and class field."""
    for owner in (node for tree in trees for node in ast.walk(tree)):
        if not isinstance(owner, ast.ClassDef):
            continue
        for node in owner.body:
            if isinstance(node, ast.FunctionDef) and node.name == "__init__":
                given = node.args
                for argument in [*given.posonlyargs, *given.args, *given.kwonlyargs]:
                    if argument.arg != "self":
                        yield owner.name, argument.arg, argument.annotation
            elif isinstance(node, ast.AnnAssign):
                yield owner.name, ast.unparse(node.target), node.annotation
