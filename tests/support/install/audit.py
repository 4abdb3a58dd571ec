"""Read the requests and the used rights from the audit log of an API server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from baton_kube.client import Object


class Right(NamedTuple):
    """One verb on one resource (`pods`, `pods/status`) of one API group."""

    group: str
    resource: str
    verb: str


class Audit:
    """The requests of one user in an audit log."""

    def __init__(self, log: Path, user: str) -> None:
        events = (json.loads(line) for line in log.read_text().splitlines() if line.endswith("}"))
        self._events: list[Object] = [
            event for event in events if event["user"]["username"] == user
        ]

    @property
    def forbidden(self) -> list[str]:
        """The URIs of requests that were refused because of a missing right."""
        return sorted({event["requestURI"] for event in self._events if _code(event) == 403})

    @property
    def used(self) -> set[Right]:
        """The rights that the allowed requests needed.

        An apply that creates an object needs `create` and `patch`.
        """
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
    """Return the rights that the rules of a role grant."""
    return {
        Right(group, resource, verb)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
