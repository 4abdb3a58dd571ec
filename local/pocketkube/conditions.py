"""Conditions and phases in the status of Kubernetes objects."""

from __future__ import annotations

from typing import Any

#: Phases of a pod whose containers will not run again.
TERMINAL_PHASES = ("Succeeded", "Failed")


def has_condition(obj: dict[str, Any], kind: str) -> bool:
    """Return whether the object has a condition of type `kind` whose status is True."""
    conditions = (obj.get("status") or {}).get("conditions") or ()
    return any(each["type"] == kind and each["status"] == "True" for each in conditions)
