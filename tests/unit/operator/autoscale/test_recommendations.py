"""The size that each measurement recommends."""

from __future__ import annotations

from typing import Any

import pytest

from baton_operator.autoscale.decision_history import Breach
from baton_operator.autoscale.recommendations import (
    Recommendation,
    Targets,
    recommend_after_breach,
    recommend_aggregated,
    recommend_decode,
    recommend_prefill,
)
from baton_operator.autoscale.windows import RoleWindow

TARGETS = Targets(ttft_s=1.0, itl_s=0.05)
TOLERANCE, QUANTILE = 0.1, 0.95


def sizes(recommendations: list[Recommendation]) -> dict[str, int]:
    return {each.reason: each.size for each in recommendations}


def decode(n: int = 4, **fields: Any) -> dict[str, int]:
    role = RoleWindow(engines=n, tokens=1000.0, **fields)
    return sizes(recommend_decode(n, role, TARGETS, TOLERANCE, QUANTILE))


def prefill(n: int = 4, **fields: Any) -> dict[str, int]:
    role = RoleWindow(engines=n, first_tokens=1000.0, **fields)
    return sizes(recommend_prefill(n, role, TARGETS, TOLERANCE, QUANTILE))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        # A missed target: in proportion, as in an HPA.
        ({"itl_s": 0.1, "running": 8.0}, {"ITLAboveTarget": 8}),
        # One sequence per engine: more engines would not help.
        ({"itl_s": 0.1, "running": 1.0}, {"TargetUnreachable": 4}),
        # Half of the target: steps of 2 engines take at most twice as long, which is too long.
        ({"itl_s": 0.025, "running": 8.0}, {"ITLAboveTarget": 3}),
        ({"kv_usage": 1.0, "running": 8.0}, {"KVUsageHigh": 5}),
        ({"running": 2.0, "waiting": 1.0}, {"RequestsQueue": 6}),
        ({"running": 2.0, "waiting": 0.5}, {"RequestsQueue": 4}),
        ({"running": 2.0}, {"RequestsQueue": 1, "ITLAboveTarget": 1, "KVUsageHigh": 1}),
    ],
)
def test_sizes_of_decode_engines(fields: dict[str, Any], expected: dict[str, int]) -> None:
    assert expected.items() <= decode(**fields).items()


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        # Busy engines without a queue need no more engines; idle ones are too many.
        ({"busy": 1.0}, {"EnginesBusy": 4}),
        ({"busy": 0.4}, {"EnginesBusy": 2}),
        # Requests do not wait for an engine, so the prompts themselves take too long.
        ({"ttft_s": 3.0, "busy": 0.5, "prefill_s": 2.9}, {"TargetUnreachable": 4}),
        # A queue, and no prompt was computed in the window.
        ({"waiting": 5.0}, {"RequestsQueue": 8}),
        # 4 engines compute 2 prompts/s: arrivals and the drain of 80 prompts in 60 s need 9.
        (
            {"waiting": 20.0, "busy": 1.0, "requests_per_s": 2.0, "waiting_growth_per_s": 0.2},
            {"RequestsQueue": 9},
        ),
    ],
)
def test_sizes_of_prefill_engines(fields: dict[str, Any], expected: dict[str, int]) -> None:
    assert expected.items() <= prefill(**fields).items()


def test_few_observations_do_not_raise_the_size() -> None:
    role = RoleWindow(engines=4, itl_s=0.1, tokens=19.0, running=8.0)
    found = sizes(recommend_decode(4, role, TARGETS, TOLERANCE, QUANTILE))
    assert found["ITLAboveTarget"] == 4


def test_engines_without_prefill_engines_are_also_sized_by_ttft() -> None:
    role = RoleWindow(engines=4, ttft_s=2.0, first_tokens=100.0, running=8.0)
    found = sizes(recommend_aggregated(4, role, TARGETS, TOLERANCE, QUANTILE))
    assert found["TTFTAboveTarget"] == 8


def test_after_a_breach_the_load_per_engine_stays_below_that_of_the_breach() -> None:
    role = RoleWindow(engines=4, busy=0.45)
    breach = Breach(0.0, 1.0)
    assert recommend_after_breach(4, True, role, breach, TOLERANCE).size == 2
    assert recommend_after_breach(4, True, role, Breach(0.0, 0.1), TOLERANCE).size == 4
