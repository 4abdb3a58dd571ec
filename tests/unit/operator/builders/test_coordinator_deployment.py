"""The coordinator of an expert-parallel group: its pod and its options."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec

from baton_engine.elastic.coordinator import coordinator_cli
from baton_engine.elastic.coordinator.controller_config import ControllerConfig
from baton_operator.api.spec_groups import Rebalance
from baton_operator.builders import coordinator_deployment
from support.operator.services import resolved

RANKS: dict[str, Any] = {
    "decode": {"replicas": 2, "parallelism": {"expert": True, "tensor": 2, "redundantExperts": 3}}
}


def test_each_field_of_rebalance_reaches_the_coordinator() -> None:
    def configured(**rebalance: Any) -> dict[str, Any]:
        parallelism = {"expert": True, "rebalance": rebalance}
        deployment = coordinator_deployment.build(resolved(decode={"parallelism": parallelism}))
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        return vars(coordinator_cli._parser().parse_args(container["command"][1:]))

    cases: dict[str, tuple[Any, dict[str, float]]] = {
        "enabled": (False, {"rebalance_threshold": 0.0, "rebalance_max_move_bytes": 0.0}),
        "thresholdPercent": (7, {"rebalance_threshold": 1.07}),
        "minIntervalSeconds": (60, {"rebalance_window_s": 60.0}),
        "maxMoveMemory": ("3Mi", {"rebalance_max_move_bytes": 3.0 * 2**20}),
    }
    before = configured()
    assert [before[setting.option] for setting in coordinator_deployment.REBALANCE] == [
        1.2,
        300.0,
        2.0 * 2**30,
    ]
    for field in msgspec.structs.fields(Rebalance):
        value, options = cases[field.encode_name]
        after = configured(**{field.encode_name: value})
        assert {name: after[name] for name in after if after[name] != before[name]} == options
    declared = {field.name for field in dataclasses.fields(ControllerConfig)}
    assert {setting.option for setting in coordinator_deployment.REBALANCE} <= declared


def test_the_coordinator_is_one_restricted_pod_without_an_api_token() -> None:
    deployment = coordinator_deployment.build(resolved(coordinator="10.0.0.1", **RANKS))
    spec = deployment["spec"]
    assert (spec["replicas"], spec["strategy"]) == (1, {"type": "Recreate"})
    assert spec["selector"]["matchLabels"].items() <= spec["template"]["metadata"]["labels"].items()
    pod = spec["template"]["spec"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"]
    (container,) = pod["containers"]
    assert container["command"][0] == "baton-coordinator"
    assert {port["name"]: port["containerPort"] for port in container["ports"]} == {
        "ranks": 5560,
        "http": 8001,
    }
    assert container["livenessProbe"]["httpGet"] == {
        "path": "/health",
        "port": "http",
        "scheme": "HTTP",
    }
    assert container["readinessProbe"]["httpGet"]["path"] == "/ready"
    security = container["securityContext"]
    assert security["readOnlyRootFilesystem"]
    assert not security["allowPrivilegeEscalation"]
