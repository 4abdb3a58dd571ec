"""What the Gateways that an HTTPRoute names make of it. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

Object = dict[str, Any]

ROUTE_PENDING = "RoutePending"
ROUTE_NOT_ACCEPTED = "RouteNotAccepted"
_JUDGED = ("Accepted", "ResolvedRefs")


class RouteProblem(msgspec.Struct, frozen=True):
    """Why nothing comes in through the route."""

    reason: str
    message: str


def route_problem(route: Object) -> RouteProblem | None:
    """None: at least one Gateway has accepted the route as it is now."""
    metadata = route["metadata"]
    complaints = []
    for parent in (route.get("status") or {}).get("parents") or []:
        conditions = {c["type"]: c for c in parent.get("conditions") or [] if _is_current(c, metadata)}
        wrong = [c for kind in _JUDGED if (c := conditions.get(kind)) is not None and c["status"] == "False"]
        accepted = (conditions.get("Accepted") or {}).get("status") == "True"
        if accepted and not wrong:
            return None
        complaints += [f"{_name(parent.get('parentRef') or {})}: {_words(condition)}" for condition in wrong]
    if complaints:
        return RouteProblem(
            ROUTE_NOT_ACCEPTED, f"no Gateway takes HTTPRoute {metadata['name']}: {'; '.join(sorted(complaints))}"
        )
    wanted = ", ".join(_name(reference) for reference in (route.get("spec") or {}).get("parentRefs") or [])
    return RouteProblem(ROUTE_PENDING, f"HTTPRoute {metadata['name']} waits to be accepted by {wanted}")


def _is_current(condition: Object, metadata: Object) -> bool:
    """Whether it is about the route as it is now."""
    generation = metadata.get("generation", 0)
    return bool(condition.get("observedGeneration", generation) >= generation)


def _words(condition: Object) -> str:
    message = f": {condition['message']}" if condition.get("message") else ""
    return f"{condition['type']} is False, {condition.get('reason') or 'it does not say why'}{message}"


def _name(reference: Object) -> str:
    namespace = f"{reference['namespace']}/" if reference.get("namespace") else ""
    section = f" (section {reference['sectionName']})" if reference.get("sectionName") else ""
    return f"{reference.get('kind', 'Gateway')} {namespace}{reference.get('name', '')}{section}"
