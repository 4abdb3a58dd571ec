"""The diagnosis of engines that are asleep or paused."""

from __future__ import annotations

import pytest

from baton_operator.status.reasons import Progress
from baton_operator.status.suspended_engines import diagnose_suspended
from baton_protocol.process.health import Health

PODS = [{"metadata": {"name": f"demo-decode-{ordinal}"}} for ordinal in range(3)]
ASLEEP, PAUSED = Health("Asleep", "x"), Health("Paused", "x")


@pytest.mark.parametrize(
    ("replies", "reason", "texts"),
    [
        (
            {"demo-decode-1": PAUSED},
            Progress.ENGINE_PAUSED,
            ["pod demo-decode-1 is paused; resume"],
        ),
        (
            {"demo-decode-2": ASLEEP, "demo-decode-0": ASLEEP},
            Progress.ENGINE_ASLEEP,
            ["pods demo-decode-0, demo-decode-2 are asleep; wake up with POST /wake_up on port"],
        ),
        (
            {"demo-decode-0": PAUSED, "demo-decode-1": ASLEEP},
            Progress.ENGINE_ASLEEP,
            ["demo-decode-1 is asleep; wake", "; pod demo-decode-0 is paused; resume"],
        ),
    ],
)
def test_the_engines_and_their_remedy_are_named(
    replies: dict[str, Health], reason: Progress, texts: list[str]
) -> None:
    diagnosis = diagnose_suspended(PODS, replies)
    assert diagnosis is not None
    assert diagnosis.reason == reason
    for text in texts:
        assert text in diagnosis.message


def test_other_pods_and_other_replies_are_no_suspension() -> None:
    assert diagnose_suspended(PODS, {"demo-prefill-0": PAUSED}) is None
    assert diagnose_suspended(PODS, {"demo-decode-0": Health("Loading", "x")}) is None
