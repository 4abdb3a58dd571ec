"""The results of probes, and handlers that are refused."""

import pytest

from pocketkube.containers.environment import ConfigError
from pocketkube.containers.probes import ProbeVerdict, check_handlers


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
