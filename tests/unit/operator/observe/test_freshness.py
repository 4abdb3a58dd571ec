"""How recent reads must be, and errors of a watch cache that lags."""

from __future__ import annotations

import pytest

from baton_kube.client import KubeError
from baton_operator.observe.freshness import GATEWAY_TIMEOUT, OLDEST, Freshness, StaleReadError


def test_the_newest_version_of_each_kind_is_required() -> None:
    freshness = Freshness(is_consistent=False, versions={})
    freshness.record("Pod", "9")
    freshness.record("Pod", "10")
    freshness.record("Pod", "8")
    freshness.record("Service", "not a number")
    assert freshness.of("Pod") == "10"
    assert freshness.of("Service") == OLDEST
    assert Freshness(versions=freshness.versions).of("Pod") is None


@pytest.mark.parametrize(
    ("is_consistent", "status", "error"),
    [
        (False, GATEWAY_TIMEOUT, StaleReadError),
        (True, GATEWAY_TIMEOUT, KubeError),
        (False, 500, KubeError),
    ],
)
def test_only_a_lagging_watch_cache_makes_a_read_stale(
    is_consistent: bool, status: int, error: type[Exception]
) -> None:
    with pytest.raises(error), Freshness(is_consistent=is_consistent).detect_lag():
        raise KubeError(status, "Timeout", "too large resource version")


def test_changes_need_consistent_reads() -> None:
    Freshness().require_consistent()
    with pytest.raises(StaleReadError):
        Freshness(is_consistent=False).require_consistent()
