"""Who asked an API server for what, from its audit log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

Object = dict[str, Any]


class Right(NamedTuple):
    """What a rule of a role grants: one verb on one resource (`pods`, `pods/status`) of one group."""

    group: str
    resource: str
    verb: str


class Audit:
    """The requests of one user."""

    def __init__(self, log: Path, user: str) -> None:
        events = (json.loads(line) for line in log.read_text().splitlines() if line.endswith("}"))
        self._events: list[Object] = [
            event for event in events if event["user"]["username"] == user
        ]

    @property
    def forbidden(self) -> list[str]:
        """What was refused for want of a right."""
        return sorted({event["requestURI"] for event in self._events if _code(event) == 403})

    @property
    def used(self) -> set[Right]:
        """Rights without which a request would have been refused. An apply that makes the object needs create besides patch."""
        found = set()
        for event in self._events:
            if (reference := event.get("objectRef")) is None or _code(event) in (0, 403):
                continue
            resource = "/".join(filter(None, (reference["resource"], reference.get("subresource"))))
            verbs = {event["verb"]} | (
                {"create"} if event["verb"] == "patch" and _code(event) == 201 else set()
            )
            found |= {Right(reference.get("apiGroup", ""), resource, verb) for verb in verbs}
        return found


def _code(event: Object) -> int:
    return int((event.get("responseStatus") or {}).get("code", 0))


def granted(rules: list[Object]) -> set[Right]:
    """The rules of a role, one by one."""
    return {
        Right(group, resource, verb)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
