"""Find out why no Gateway has accepted the HTTPRoute of a service. Pure."""

from __future__ import annotations

from baton_kube.client import Object
from baton_operator.status.diagnose import Diagnosis
from baton_operator.status.reasons import Failure, Progress


def diagnose_route(route: Object) -> Diagnosis | None:
    """Return why no Gateway has accepted the current spec of the HTTPRoute.

    None: at least one Gateway has accepted this spec.
    """
    metadata = route["metadata"]
    complaints = []
    for parent in (route.get("status") or {}).get("parents") or []:
        current = [each for each in parent.get("conditions") or [] if _is_current(each, metadata)]
        conditions = {
            each["type"]: each for each in current if each["type"] in ("Accepted", "ResolvedRefs")
        }
        wrong = [each for each in conditions.values() if each["status"] == "False"]
        if not wrong and conditions.get("Accepted", {}).get("status") == "True":
            return None
        complaints += [
            f"{_parent_name(parent.get('parentRef') or {})}: {_complaint(each)}" for each in wrong
        ]
    if complaints:
        text = f"no Gateway accepts HTTPRoute {metadata['name']}: {'; '.join(sorted(complaints))}"
        return Diagnosis(Failure.ROUTE_NOT_ACCEPTED, text)
    wanted = ", ".join(map(_parent_name, (route.get("spec") or {}).get("parentRefs") or []))
    return Diagnosis(
        Progress.ROUTE_PENDING,
        f"HTTPRoute {metadata['name']} waits to be accepted by {wanted}; "
        "check the controller of that Gateway",
    )


def _is_current(entry: Object, metadata: Object) -> bool:
    """Return whether the condition `entry` describes the newest generation of the object."""
    generation = metadata.get("generation", 0)
    return bool(entry.get("observedGeneration", generation) >= generation)


def _complaint(entry: Object) -> str:
    message = f": {entry['message']}" if entry.get("message") else ""
    return f"{entry['type']} is False, {entry.get('reason') or 'no reason was given'}{message}"


def _parent_name(reference: Object) -> str:
    namespace = f"{reference['namespace']}/" if reference.get("namespace") else ""
    section = f" (section {reference['sectionName']})" if reference.get("sectionName") else ""
    return f"{reference.get('kind', 'Gateway')} {namespace}{reference.get('name', '')}{section}"
