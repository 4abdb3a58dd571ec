"""Parse the label and field selectors of list, watch and deletecollection."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from pocketkube.apiserver.errors import bad_request
from pocketkube.apiserver.resources import Object, lookup

Predicate = Callable[[Object], bool]

_SET = re.compile(r"^\s*([^\s!=,()]+)\s+(in|notin)\s+\(([^)]*)\)\s*$")
_EQUALITY = re.compile(r"^\s*([^\s!=,()]+)\s*(==|=|!=)\s*([^\s!=,()]*)\s*$")
_EXISTS = re.compile(r"^\s*(!?)\s*([^\s!=,()<>]+)\s*$")

#: Fields that can select objects of every kind. `_BY_KIND` has the additional fields of each kind.
_COMMON = ("metadata.name", "metadata.namespace")
_BY_KIND: dict[str, tuple[str, ...]] = {
    "pods": (
        "spec.nodeName",
        "spec.restartPolicy",
        "spec.serviceAccountName",
        "status.phase",
        "status.podIP",
    ),
    "events": (
        "involvedObject.kind",
        "involvedObject.namespace",
        "involvedObject.name",
        "involvedObject.uid",
        "involvedObject.apiVersion",
        "involvedObject.resourceVersion",
        "involvedObject.fieldPath",
        "reason",
        "reportingComponent",
        "source",
        "type",
    ),
    "secrets": ("type",),
    "namespaces": ("status.phase",),
    "nodes": ("spec.unschedulable",),
    "replicasets.apps": ("status.replicas",),
}


def _split(selector: str) -> list[str]:
    """Split a selector at the commas that are outside parentheses."""
    parts, depth, current = [], 0, ""
    for char in selector:
        depth += (char == "(") - (char == ")")
        if char == "," and depth == 0:
            parts.append(current)
            current = ""
        else:
            current += char
    return [part for part in [*parts, current] if part.strip()]


def _label_requirement(text: str) -> Callable[[Mapping[str, str]], bool]:
    if match := _SET.match(text):
        key, operator, values = match[1], match[2], {value.strip() for value in match[3].split(",")}
        if operator == "in":
            return lambda labels: key in labels and labels[key] in values
        return lambda labels: labels.get(key) not in values
    if match := _EQUALITY.match(text):
        key, operator, value = match[1], match[2], match[3]
        if operator == "!=":
            return lambda labels: labels.get(key) != value
        return lambda labels: labels.get(key) == value
    if match := _EXISTS.match(text):
        key, absent = match[2], bool(match[1])
        return lambda labels: (key not in labels) if absent else (key in labels)
    raise bad_request(f"unable to parse requirement: {text!r} is not a label selector")


def label_selector(selector: str) -> Predicate:
    """Return a predicate for a label selector, such as `a=b,c!=d,e in (x,y),!f`.

    Raises:
        ApiError: 400, the selector is malformed.
    """
    requirements = [_label_requirement(part) for part in _split(selector)]

    def matches(obj: Object) -> bool:
        labels = obj["metadata"].get("labels") or {}
        for requirement in requirements:  # noqa: SIM110 - a generator costs twice as much, and every list runs this
            if not requirement(labels):
                return False
        return True

    return matches


def required_labels(selector: str) -> list[tuple[str, str]]:
    """Return the `a=b` terms of a label selector as (key, value) pairs.

    Every object that matches the selector has these labels.
    """
    matches = (_EQUALITY.match(part) for part in _split(selector))
    return [(match[1], match[3]) for match in matches if match and match[2] != "!="]


def _field_value(obj: Object, path: str) -> str:
    value = lookup(obj, path)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):  # `source` selects by the event's component
        value = value.get("component")
    return "" if value is None else str(value)


def field_selector(selector: str, storage: str) -> Predicate:
    """Return a predicate for a field selector, such as `metadata.name=x,status.phase!=Running`.

    Raises:
        ApiError: 400, the selector is malformed, or has a field that the kind does not support.
    """
    allowed = (*_COMMON, *_BY_KIND.get(storage, ()))
    terms: list[tuple[str, bool, str]] = []
    for part in _split(selector):
        match = _EQUALITY.match(part)
        if not match:
            raise bad_request(f"invalid selector: {part!r}; can't understand {selector!r}")
        if match[1] not in allowed:
            raise bad_request(
                f'field label not supported: "{match[1]}"; {storage} can be selected by '
                f"{', '.join(allowed)}"
            )
        terms.append((match[1], match[2] != "!=", match[3]))
    return lambda obj: all(
        (_field_value(obj, path) == value) == equal for path, equal, value in terms
    )
