"""Compile the CEL rules of a schema (`x-kubernetes-validations`), and evaluate them on writes.

In a rule, `self` is the value to validate. A rule with `oldSelf` is a transition rule. It runs only
if an old value exists, or if the rule has `optionalOldSelf`. A rule without `oldSelf` is skipped
for a value that the write does not change, as in the validation ratcheting of Kubernetes.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import celpy

from pocketkube.apiserver.errors import FieldError, invalid_value
from pocketkube.apiserver.resources import Object

_OLD_SELF = re.compile(r"\boldSelf\b")
#: Reason of an error -> the words with which its message begins.
_WORDS = {
    "FieldValueForbidden": "Forbidden",
    "FieldValueRequired": "Required value",
    "FieldValueDuplicate": "Duplicate value",
}


class RuleSyntaxError(ValueError):
    """A CEL rule does not compile. The message has the schema path and the compiler's error."""


@dataclass(frozen=True)
class _Rule:
    """One compiled CEL rule."""

    #: A program compiled by celpy, a package without type annotations.
    program: Any
    #: Whether the rule has `oldSelf`.
    reads_old: bool
    #: Whether the rule runs only if an old value exists.
    transition: bool
    #: Source text of the rule.
    text: str
    message: str
    message_program: Any
    reason: str
    field_path: str


@dataclass(frozen=True)
class _Node:
    """The rules of one schema node and of the nodes below it."""

    rules: tuple[_Rule, ...]
    properties: dict[str, _Node]
    items: _Node | None
    values: _Node | None
    #: Fields that identify an item in the old and in the new list.
    keys: tuple[str, ...]

    @property
    def empty(self) -> bool:
        return not (self.rules or self.properties or self.items or self.values)


class Rules:
    """The compiled rules of one schema.

    Raises:
        RuleSyntaxError: a rule does not compile.
    """

    def __init__(self, schema: Object) -> None:
        self._environment = celpy.Environment()
        self._root = self._compile_node(schema, "openAPIV3Schema")

    def check(self, obj: Object, old: Object | None) -> list[FieldError]:
        """Return an error for each CEL rule that `obj` breaks.

        Args:
            old: the object before the write; None for a new object.
        """
        return list(self._check(self._root, obj, old, ""))

    def _program(self, expression: str, path: str) -> Any:
        try:
            return self._environment.program(self._environment.compile(expression))
        except celpy.CELParseError as error:
            raise RuleSyntaxError(
                f"{path}.x-kubernetes-validations: {expression!r} does not compile: {error}"
            ) from error

    def _compile_node(self, schema: Object, path: str) -> _Node:
        rules = []
        for rule in schema.get("x-kubernetes-validations") or ():
            text = rule.get("rule", "")
            expression = rule.get("messageExpression")
            reads_old = bool(_OLD_SELF.search(text))
            rules.append(
                _Rule(
                    program=self._program(text, path),
                    reads_old=reads_old,
                    transition=reads_old and not rule.get("optionalOldSelf"),
                    text=text,
                    message=rule.get("message", ""),
                    message_program=self._program(expression, path) if expression else None,
                    reason=rule.get("reason", "FieldValueInvalid"),
                    field_path=rule.get("fieldPath", ""),
                )
            )
        properties = {
            name: node
            for name, below in (schema.get("properties") or {}).items()
            if not (node := self._compile_node(below, f"{path}.{name}")).empty
        }
        items = self._below(schema.get("items"), f"{path}[*]")
        values = self._below(schema.get("additionalProperties"), f"{path}.*")
        keys = tuple(schema.get("x-kubernetes-list-map-keys") or ())
        return _Node(tuple(rules), properties, items, values, keys)

    def _below(self, schema: Any, path: str) -> _Node | None:
        if not isinstance(schema, dict):
            return None
        node = self._compile_node(schema, path)
        return None if node.empty else node

    def _check(self, node: _Node, value: Any, old: Any, path: str) -> Iterator[FieldError]:
        for rule in node.rules:
            if (rule.reads_old or value != old) and not (rule.transition and old is None):
                yield from self._evaluate(rule, value, old, path)
        if isinstance(value, dict):
            before = old if isinstance(old, dict) else {}
            for name, below in value.items():
                if child := node.properties.get(name, node.values):
                    here = f"{path}.{name}" if path else name
                    yield from self._check(child, below, before.get(name), here)
        elif isinstance(value, list) and node.items:
            for index, item in enumerate(value):
                before = _counterpart(item, old, node.keys)
                yield from self._check(node.items, item, before, f"{path}[{index}]")

    def _evaluate(self, rule: _Rule, value: Any, old: Any, path: str) -> Iterator[FieldError]:
        """Yield an error if the rule refuses `value`, or if the evaluation of the rule fails."""
        names = {"self": celpy.json_to_cel(value), "oldSelf": celpy.json_to_cel(old)}
        message = rule.message or f"failed rule: {rule.text}"
        try:
            if rule.program.evaluate(names):
                return
            if rule.message_program:
                # If the message expression fails, `rule.message` is used, as in Kubernetes.
                with contextlib.suppress(celpy.CELEvalError):
                    message = str(rule.message_program.evaluate(names))
        except celpy.CELEvalError as error:
            message = f"rule evaluation error: {error.args[0] if error.args else error}"
        field = f"{path}{rule.field_path}".lstrip(".") or "<nil>"
        if rule.reason in _WORDS:
            yield FieldError(field, rule.reason, f"{_WORDS[rule.reason]}: {message}")
        else:
            yield invalid_value(field, value, message)


def _counterpart(item: Any, old: Any, keys: tuple[str, ...]) -> Any:
    """Return the item of the list `old` whose key fields, `keys`, equal those of `item`.

    The result is None if no item matches, or if `keys` is empty.
    """
    if not keys or not isinstance(old, list) or not isinstance(item, dict):
        return None
    return next(
        (before for before in old if all(before.get(key) == item.get(key) for key in keys)), None
    )
