"""The restart backoff, the results of probes, and handlers that are refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pocketkube.containers.backoff import BackoffPolicy
from pocketkube.containers.environment import ConfigError
from pocketkube.containers.probes import ProbeVerdict, check_handlers


@given(runs=st.lists(st.floats(0, 200), max_size=30))
def test_the_backoff_stays_in_bounds_and_resets_after_a_long_run(runs: list[float]) -> None:
    policy = BackoffPolicy(base_s=1, cap_s=30, reset_after_s=60)
    delay = 0.0
    for ran in runs:
        after = policy.next_delay(delay, ran)
        assert 1 <= after <= 30
        assert after == 1 if ran >= 60 or delay == 0 else after == min(2 * delay, 30)
        delay = after


def test_a_probe_changes_after_as_many_equal_results_as_its_threshold() -> None:
    verdict = ProbeVerdict(success_threshold=2, failure_threshold=3)
    seen = [
        verdict.observe(result) for result in (True, True, False, False, True, False, False, False)
    ]
    assert seen == [None, True, None, None, None, None, None, False]


@pytest.mark.parametrize(
    "handlers",
    [
        {"livenessProbe": {"exec": {"command": ["true"]}}},
        {"startupProbe": {"tcpSocket": {"port": 80}}},
        {"lifecycle": {"preStop": {"httpGet": {"port": 80}}}},
    ],
)
def test_a_container_with_a_hook_or_another_probe_than_http_is_refused(handlers: dict) -> None:
    check_handlers({"name": "main", "readinessProbe": {"httpGet": {"port": 80}}})
    with pytest.raises(ConfigError, match="not supported here"):
        check_handlers({"name": "main", **handlers})
