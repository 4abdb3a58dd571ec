"""Waiting times of the queueing model."""

from __future__ import annotations

import pytest

from baton_operator.autoscale.queueing import wait_quantile_s


def test_waits_of_the_queueing_model() -> None:
    # M/M/1 with u = 0.8: P(wait) = u, the rest exponential with mean s / (1 - u).
    assert wait_quantile_s(1, 0.8, 0.1, 0.95) == pytest.approx(1.386, abs=0.01)
    assert wait_quantile_s(10, 8.0, 0.1, 0.95) < wait_quantile_s(9, 8.0, 0.1, 0.95)
    assert wait_quantile_s(10, 3.0, 0.1, 0.95) == 0.0
    assert wait_quantile_s(2, 2.0, 0.1, 0.95) == float("inf")
