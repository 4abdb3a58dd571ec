"""A service's key: its Secret, and the pods that mount it."""

from __future__ import annotations

from typing import Any

import pytest

from baton_operator.builders import coordinator_deployment, service_key_secret
from baton_operator.builders.gateway import gateway_deployment
from baton_operator.builders.member_pods import MemberTemplate
from baton_operator.builders.resolved_service import ResolvedService
from baton_operator.names import GROUP, MEMBER_ROLES
from baton_protocol.options.config import EngineConfig, GatewayConfig
from baton_protocol.service_key import ServiceKey
from support.operator.services import decoded_config, resolved

EXPERTS: dict[str, Any] = {"prefill": {}, "decode": {"parallelism": {"expert": True}}}


def pod_specs(service: ResolvedService) -> dict[str, dict[str, Any]]:
    """Return the pod templates of an expert-parallel service by role."""
    templates = {role: MemberTemplate(service, role).pod(0) for role in MEMBER_ROLES}
    for role, build in (
        ("gateway", gateway_deployment.build),
        ("coordinator", coordinator_deployment.build),
    ):
        templates[role] = build(service)["spec"]["template"]
    return templates


def test_every_pod_of_a_service_mounts_the_service_key() -> None:
    for spec in (EXPERTS, {}):
        for role, template in pod_specs(
            resolved(coordinator="10.0.0.1", key_name="k1", **spec)
        ).items():
            (volume,) = [volume for volume in template["spec"]["volumes"] if "secret" in volume]
            assert volume["secret"]["secretName"] == "demo-key"
            (container,) = template["spec"]["containers"]
            (mount,) = [
                mount for mount in container["volumeMounts"] if mount["name"] == volume["name"]
            ]
            assert mount["readOnly"]
            assert (mount["mountPath"], service_key_secret.ENTRY) == (
                "/etc/baton/service-key",
                "key",
            ), role
    assert decoded_config("decode", EngineConfig).service_key_file == "/etc/baton/service-key/key"
    assert (
        decoded_config("prefill", EngineConfig, prefill={}).service_key_file
        == "/etc/baton/service-key/key"
    )
    assert decoded_config("gateway", GatewayConfig).service_key_file == "/etc/baton/service-key/key"
    (container,) = pod_specs(resolved(coordinator="10.0.0.1", **EXPERTS))["coordinator"]["spec"][
        "containers"
    ]
    assert container["command"][:3] == [
        "baton-coordinator",
        "--service-key-file",
        "/etc/baton/service-key/key",
    ]


def test_a_new_key_changes_the_revision_of_every_pod_and_the_expert_group() -> None:
    before, after = (
        resolved(coordinator="10.0.0.1", key_name=key, **EXPERTS) for key in ("k1", "k2")
    )
    for role, template in pod_specs(before).items():
        assert template["metadata"]["annotations"][f"{GROUP}/service-key"] == "k1"
        assert pod_specs(after)[role]["metadata"]["annotations"][f"{GROUP}/service-key"] == "k2"
    for role in MEMBER_ROLES:
        assert MemberTemplate(before, role).revision != MemberTemplate(after, role).revision
    assert (
        MemberTemplate(before, "decode").expert_group
        != MemberTemplate(after, "decode").expert_group
    )


def test_a_template_cannot_change_the_key_annotation() -> None:
    for overlay in (
        {"annotations": None},
        {"annotations": {f"{GROUP}/service-key": "mine", "note": "x"}},
    ):
        pod = MemberTemplate(
            resolved(key_name="k1", decode={"template": {"metadata": overlay}}), "decode"
        ).pod(0)
        assert pod["metadata"]["annotations"][f"{GROUP}/service-key"] == "k1"


def test_the_key_is_random_and_immutable_and_its_name_does_not_reveal_it() -> None:
    first, second = service_key_secret.generate(), service_key_secret.generate()
    assert (len(first), len(bytes.fromhex(first.decode()))) == (64, 32)
    assert first != second
    secret = service_key_secret.build(resolved(), first)
    assert (secret["metadata"]["name"], secret["immutable"]) == ("demo-key", True)
    key = service_key_secret.read(secret)
    assert key.bearer == ServiceKey(first).bearer
    assert service_key_secret.name_of(key) != service_key_secret.name_of(ServiceKey(second))
    assert service_key_secret.name_of(key) not in first.decode()


@pytest.mark.parametrize("data", [None, {}, {"other": "eA=="}, {"key": "???"}, {"key": "eA=="}])
def test_a_secret_without_a_valid_key_is_refused(data: dict[str, str] | None) -> None:
    with pytest.raises(ValueError, match=r"entry 'key'|at least"):
        service_key_secret.read({"data": data})
