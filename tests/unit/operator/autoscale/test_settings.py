"""The autoscaling settings of a service."""

from __future__ import annotations

from typing import Any

import pytest

from baton_operator.autoscale.settings import (
    SCRAPE_S,
    WAKEFUL_SCRAPE_S,
    scrape_period_s,
    settings_of,
)
from support.operator.services import resolved

DECODE = {"maxReplicas": 8, "itlMilliseconds": 50}
TO_ZERO = {**DECODE, "minReplicas": 0, "idleSeconds": 60}


@pytest.mark.parametrize(
    ("autoscaling", "size", "period_s"),
    [
        (DECODE, 3, SCRAPE_S),
        (TO_ZERO, 1, SCRAPE_S),
        (TO_ZERO, 0, WAKEFUL_SCRAPE_S),
        ({**TO_ZERO, "idleSeconds": 20}, 1, 5.0),
    ],
)
def test_services_near_zero_are_checked_more_often(
    autoscaling: dict[str, Any], size: int, period_s: float
) -> None:
    settings = settings_of(resolved(decode={"autoscaling": autoscaling}).spec)
    assert scrape_period_s(settings, {"decode": size}) == period_s
