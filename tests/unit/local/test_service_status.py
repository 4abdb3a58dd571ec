"""Which failures of a service end a wait for Ready."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from baton_local.service_status import FINAL_REASONS, ServiceCondition, ServiceStatus

TROUBLESHOOTING = Path(__file__).parents[3] / "docs" / "operate" / "troubleshooting.md"


def final_failure(*conditions: tuple[str, str, str]) -> str | None:
    found = [ServiceCondition(kind, status, reason, "why") for kind, status, reason in conditions]
    status = ServiceStatus("demo", "default", "", "demo", found, [], "", "/k")
    return status.final_failure.type if status.final_failure else None


@pytest.mark.parametrize(
    ("conditions", "failed"),
    [
        ([], None),
        ([("Ready", "False", "Starting")], None),
        ([("Ready", "False", "NoCapacity"), ("ModelAvailable", "Unknown", "NotObserved")], None),
        ([("Ready", "False", "ModelSourceUnavailable")], None),
        ([("Ready", "False", "ReconcileError")], None),
        ([("Ready", "False", "InternalError")], None),
        ([("Ready", "False", "InvalidSpec")], "Ready"),
        ([("Ready", "False", "ServiceKeyUnusable")], "Ready"),
        ([("Ready", "True", "AllGroupsReady"), ("Updating", "False", "Paused")], None),
        ([("Available", "False", "Starting"), ("Ready", "False", "ModelNotFound")], "Ready"),
        ([("Ready", "False", "PodRefused"), ("ModelAvailable", "False", "ImageVolumeUnsupported")],
         "ModelAvailable"),
    ],
)  # fmt: skip
def test_only_failures_that_waiting_does_not_end_are_final(conditions, failed) -> None:
    assert final_failure(*conditions) == failed


def test_every_reason_of_a_component_is_final_unless_free_memory_ends_it() -> None:
    section = TROUBLESHOOTING.read_text().split("## Reasons from a component")[1].split("\n## ")[0]
    reasons = re.findall(r"^\| `(\w+)`", section, re.MULTILINE)
    assert "InvalidConfig" in reasons
    assert set(reasons) - FINAL_REASONS == {"InsufficientMemory"}
