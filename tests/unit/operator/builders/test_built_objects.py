"""The objects that are built for a service."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from baton_operator.api.field_types import quantity_bytes
from baton_operator.apply import contains
from baton_operator.builders import config, coordinator, gateway, service_key
from baton_operator.builders.disruption_budget import disruption_budget
from baton_operator.builders.member import MemberTemplate, headless_service
from baton_operator.builders.overlay import merge
from baton_operator.builders.owner import Owner
from baton_operator.desired import compute_desired
from baton_operator.names import GROUP, MEMBER_ROLES, ConfiguredRole, Role
from baton_protocol.config import EngineConfig, GatewayConfig, KVRole, KVTransferConfig
from baton_protocol.service_key import ServiceKey
from support.operator.services import owner

EXPERTS: dict[str, Any] = {"prefill": {}, "decode": {"parallelism": {"expert": True}}}


def read(role: Role, type_: type[Any], **spec: Any) -> Any:
    """The configuration as the component decodes it."""
    return msgspec.json.decode(
        config.config_map(owner(**spec), role)["data"][f"{role}.json"], type=type_
    )


def test_engines_are_told_their_side_of_the_hand_off() -> None:
    assert read("prefill", EngineConfig, prefill={}).kv_transfer.role is KVRole.PRODUCER
    assert read("decode", EngineConfig, prefill={}).kv_transfer.role is KVRole.CONSUMER
    assert read("decode", EngineConfig).kv_transfer.role is KVRole.NONE


def pod_specs(service: Owner) -> dict[str, dict[str, Any]]:
    """Pod templates of an expert-parallel service by role: metadata and spec."""
    templates = {role: MemberTemplate(service, role).pod(0) for role in MEMBER_ROLES}
    for role, build in (("gateway", gateway.deployment), ("coordinator", coordinator.deployment)):
        templates[role] = build(service)["spec"]["template"]
    return templates


def test_every_pod_of_a_service_reads_the_services_key() -> None:
    for spec in (EXPERTS, {}):
        for role, template in pod_specs(
            owner(coordinator="10.0.0.1", key_name="k1", **spec)
        ).items():
            (volume,) = [volume for volume in template["spec"]["volumes"] if "secret" in volume]
            assert volume["secret"]["secretName"] == "demo-key"
            (container,) = template["spec"]["containers"]
            (mount,) = [
                mount for mount in container["volumeMounts"] if mount["name"] == volume["name"]
            ]
            assert mount["readOnly"]
            assert (mount["mountPath"], service_key.ENTRY) == ("/etc/baton/service-key", "key"), (
                role
            )
    assert read("decode", EngineConfig).service_key_file == "/etc/baton/service-key/key"
    assert (
        read("prefill", EngineConfig, prefill={}).service_key_file == "/etc/baton/service-key/key"
    )
    assert read("gateway", GatewayConfig).service_key_file == "/etc/baton/service-key/key"
    (container,) = pod_specs(owner(coordinator="10.0.0.1", **EXPERTS))["coordinator"]["spec"][
        "containers"
    ]
    assert container["command"] == [
        "baton-coordinator",
        "--service-key-file",
        "/etc/baton/service-key/key",
    ]


def test_another_key_makes_another_revision_of_every_pod_and_another_expert_group() -> None:
    before, after = (owner(coordinator="10.0.0.1", key_name=key, **EXPERTS) for key in ("k1", "k2"))
    for role, template in pod_specs(before).items():
        assert template["metadata"]["annotations"][f"{GROUP}/service-key"] == "k1"
        assert pod_specs(after)[role]["metadata"]["annotations"][f"{GROUP}/service-key"] == "k2"
    for role in MEMBER_ROLES:
        assert MemberTemplate(before, role).revision != MemberTemplate(after, role).revision
    assert (
        MemberTemplate(before, "decode").expert_group
        != MemberTemplate(after, "decode").expert_group
    )


def test_a_template_cannot_hide_which_key_a_pod_has() -> None:
    for overlay in (
        {"annotations": None},
        {"annotations": {f"{GROUP}/service-key": "mine", "note": "x"}},
    ):
        pod = MemberTemplate(
            owner(key_name="k1", decode={"template": {"metadata": overlay}}), "decode"
        ).pod(0)
        assert pod["metadata"]["annotations"][f"{GROUP}/service-key"] == "k1"


def test_the_key_is_random_immutable_and_named_without_telling_it() -> None:
    first, second = service_key.generate(), service_key.generate()
    assert (len(first), len(bytes.fromhex(first.decode()))) == (64, 32)
    assert first != second
    secret = service_key.secret(owner(), first)
    assert (secret["metadata"]["name"], secret["immutable"]) == ("demo-key", True)
    key = service_key.read(secret)
    assert key.bearer == ServiceKey(first).bearer
    assert service_key.name_of(key) != service_key.name_of(ServiceKey(second))
    assert service_key.name_of(key) not in first.decode()


@pytest.mark.parametrize("data", [None, {}, {"other": "eA=="}, {"key": "???"}, {"key": "eA=="}])
def test_a_secret_without_a_key_is_told(data: dict[str, str] | None) -> None:
    with pytest.raises(ValueError, match=r"entry 'key'|at least"):
        service_key.read({"data": data})


def test_prefill_and_decode_may_spread_over_different_numbers_of_workers() -> None:
    spec = {"prefill": {"parallelism": {"tensor": 2}}, "decode": {"parallelism": {"tensor": 4}}}
    assert read("prefill", EngineConfig, **spec).parallel.tensor_parallel_size == 2
    assert read("decode", EngineConfig, **spec).parallel.tensor_parallel_size == 4
    assert read("decode", EngineConfig).parallel.tensor_parallel_size == 1


@pytest.mark.parametrize("transport", ["ucx", "tcp", "shm", "nixl", "auto"])
def test_the_transport_reaches_the_engine(transport: str) -> None:
    got = read("prefill", EngineConfig, prefill={}, kvTransfer={"transport": transport}).kv_transfer
    assert (got.transport, got.rdma) == (transport, False)
    assert read(
        "prefill", EngineConfig, prefill={}, kvTransfer={"rdma": True}
    ).kv_transfer == KVTransferConfig(role=KVRole.PRODUCER, transport="ucx", rdma=True)


def test_engine_configuration_says_what_the_spec_says_and_leaves_the_rest_to_the_engine() -> None:
    tuned = {
        "blockSize": 32,
        "kvCacheMemory": "2Mi",
        "maxNumSeqs": 3,
        "numThreads": 2,
        "device": "cpu",
    }
    tuned |= {"offloadMemory": "1Gi"}
    model = {"uri": "file:///m", "dtype": "float32", "quantization": "int8"}
    got = read(
        "decode",
        EngineConfig,
        model=model,
        engine=tuned,
        kvTransfer={"loadFailurePolicy": "fail", "mode": "push", "transport": "nixl"},
        drainTimeoutSeconds=9,
    )
    assert (got.model.dtype, got.model.quantization) == ("float32", "int8")
    assert (got.cache.block_size, got.cache.memory_bytes, got.scheduler.max_num_seqs) == (
        32,
        2 * 2**20,
        3,
    )
    assert (got.num_threads, got.device, got.drain_timeout_s) == (2, "cpu", 9.0)
    assert got.cache.offload_memory_bytes == 2**30
    transfer = got.kv_transfer
    assert (transfer.load_failure_policy, transfer.mode, transfer.transport) == (
        "fail",
        "push",
        "nixl",
    )
    assert (
        got.scheduler.max_num_batched_tokens
        == EngineConfig(model=got.model).scheduler.max_num_batched_tokens
    )
    plain = json.loads(config.config_map(owner(), "decode")["data"]["decode.json"])
    assert "cache" not in plain


def test_gateway_finds_its_pods_by_service_and_serves_under_the_name_asked_for() -> None:
    got = read(
        "gateway",
        GatewayConfig,
        model={"uri": "file:///m", "servedName": "x"},
        gateway={"prefillThresholdTokens": 8},
    )
    assert (got.discovery.service, got.discovery.namespace) == ("demo", "default")
    assert (got.model.served_name, got.prefill_threshold_tokens) == ("x", 8)
    assert read("gateway", GatewayConfig).model.served_name == "demo"


def test_changing_one_role_leaves_the_others_alone() -> None:
    before, after = owner(prefill={}), owner(prefill={}, gateway={"maxConcurrentRequests": 5})
    for role in ("prefill", "decode"):
        assert MemberTemplate(before, role).revision == MemberTemplate(after, role).revision
    resized = owner(
        prefill={"replicas": 0, "template": {"metadata": {"labels": {"a": "b"}}}},
        decode={"replicas": 9},
    )
    assert MemberTemplate(before, "decode").revision == MemberTemplate(resized, "decode").revision
    assert MemberTemplate(before, "prefill").revision != MemberTemplate(resized, "prefill").revision


def test_what_an_engine_reads_is_part_of_its_revision() -> None:
    assert (
        MemberTemplate(owner(), "decode").revision
        != MemberTemplate(owner(engine={"maxNumSeqs": 5}), "decode").revision
    )
    assert (
        MemberTemplate(owner(), "decode").revision
        != MemberTemplate(owner(image="other:1"), "decode").revision
    )


def test_member_pod() -> None:
    pod = MemberTemplate(owner(engine={"numThreads": 2}), "decode").pod(3)
    assert pod["metadata"]["name"] == "demo-decode-3"
    assert pod["metadata"]["ownerReferences"][0]["uid"] == "uid-1"
    labels = pod["metadata"]["labels"]
    assert (labels[f"{GROUP}/service"], labels[f"{GROUP}/role"]) == ("demo", "decode")
    (engine,) = pod["spec"]["containers"]
    assert engine["command"] == ["baton-engine", "--config", "/etc/baton/decode.json"]
    env = {item["name"]: item for item in engine["env"]}
    assert env["POD_IP"]["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"
    assert env["OMP_NUM_THREADS"]["value"] == "2"
    writable = [mount["mountPath"] for mount in engine["volumeMounts"] if not mount.get("readOnly")]
    for cache in ("XDG_CACHE_HOME", "TRITON_CACHE_DIR"):
        assert any(env[cache]["value"].startswith(f"{path}/") for path in writable), (
            "the root file system is read-only"
        )
    assert {port["name"]: port["containerPort"] for port in engine["ports"]} == {
        "engine": 5557,
        "kv": 5558,
        "http": 8000,
    }
    assert engine["terminationMessagePolicy"] == "FallbackToLogsOnError"
    assert engine["securityContext"]["readOnlyRootFilesystem"]
    assert pod["spec"]["terminationGracePeriodSeconds"] > owner().spec.drain_timeout_seconds
    mounted = [
        volume["configMap"]["name"] for volume in pod["spec"]["volumes"] if "configMap" in volume
    ]
    assert mounted == [
        config.config_map(owner(engine={"numThreads": 2}), "decode")["metadata"]["name"]
    ]


def test_a_template_adds_and_changes_but_keeps_what_selectors_need() -> None:
    template = {
        "metadata": {
            "labels": {f"{GROUP}/role": "mine", "team": "a"},
            "annotations": {"note": "b"},
        },
        "spec": {
            "nodeSelector": {"gpu": "yes"},
            "containers": [
                {"name": "engine", "env": [{"name": "MORE", "value": "1"}]},
                {"name": "sidecar", "image": "s"},
            ],
        },
    }
    resources = {"limits": {"memory": "1Gi"}}
    pod = MemberTemplate(
        owner(decode={"template": template, "resources": resources}), "decode"
    ).pod(0)
    assert pod["metadata"]["labels"]["team"] == "a"
    assert pod["metadata"]["labels"][f"{GROUP}/role"] == "decode"
    assert pod["metadata"]["annotations"] == {"note": "b"}
    engine, sidecar = pod["spec"]["containers"]
    env = [item["name"] for item in engine["env"]]
    assert env[0] == "POD_IP"
    assert env[-1] == "MORE"
    assert engine["resources"] == resources
    assert sidecar == {"name": "sidecar", "image": "s"}


@pytest.mark.parametrize(
    ("template", "field"),
    [
        ({"spec": None}, "spec"),
        ({"spec": []}, "spec"),
        ({"metadata": None}, "metadata"),
        ({"metadata": {"labels": None}}, "metadata.labels"),
        ({"metadata": {"labels": "x"}}, "metadata.labels"),
        ({"spec": {"containers": [{"name": ["engine"]}]}}, "spec.containers"),
        ({"spec": {"containers": None}}, "spec.containers"),
    ],
)
def test_a_template_without_what_the_operator_needs_is_refused_by_field(
    template: dict[str, Any], field: str
) -> None:
    with pytest.raises(ValueError, match=rf"^decode\.template\.{field}\b"):
        MemberTemplate(owner(decode={"template": template}), "decode")


def test_merge() -> None:
    assert merge({"a": 1, "b": {"c": 2}}, {"a": None, "b": {"d": 3}}, "template") == {
        "b": {"c": 2, "d": 3}
    }
    assert merge({"command": ["a", "b"]}, {"command": ["c"]}, "template") == {"command": ["c"]}
    mounts = {"volumeMounts": [{"name": "v", "mountPath": "/a"}]}
    more = {"volumeMounts": [{"name": "v", "mountPath": "/b"}]}
    assert len(merge(mounts, more, "template")["volumeMounts"]) == 2
    with pytest.raises(ValueError, match=r"containers\[0\] must be an object with .name."):
        merge({"containers": [{"name": "a"}]}, {"containers": [{"image": "b"}]}, "template")


def test_services_select_their_pods() -> None:
    member = MemberTemplate(owner(), "decode").pod(0)["metadata"]["labels"]
    front = gateway.deployment(owner())["spec"]["template"]["metadata"]["labels"]
    headless, plain = (
        headless_service(owner())["spec"]["selector"],
        gateway.service(owner())["spec"]["selector"],
    )
    assert headless.items() <= member.items()
    assert not headless.items() <= front.items()
    assert plain.items() <= front.items()
    assert not plain.items() <= member.items()


RANKS: dict[str, Any] = {
    "decode": {"replicas": 2, "parallelism": {"expert": True, "tensor": 2, "redundantExperts": 3}}
}


@pytest.mark.parametrize(
    ("address", "told"), [("10.96.0.9", "10.96.0.9:5560"), ("fd00::9", "[fd00::9]:5560")]
)
def test_ranks_are_told_their_coordinator_and_their_name(address: str, told: str) -> None:
    parallel = read("decode", EngineConfig, coordinator=address, **RANKS).parallel
    assert (
        parallel.enable_expert_parallel,
        parallel.coordinator,
        parallel.num_redundant_experts,
    ) == (True, told, 3)
    assert (parallel.tensor_parallel_size, parallel.rank_name) == (2, "")
    (container,) = MemberTemplate(owner(coordinator=address, **RANKS), "decode").pod(0)["spec"][
        "containers"
    ]
    (name,) = [item for item in container["env"] if item["name"] == "POD_NAME"]
    assert name["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.name"
    assert not read(
        "prefill", EngineConfig, coordinator=address, prefill={}, **RANKS
    ).parallel.enable_expert_parallel
    assert not read("decode", EngineConfig).parallel.enable_expert_parallel


def test_ranks_are_made_when_the_coordinator_has_an_address() -> None:
    before, after = (
        compute_desired(owner(prefill={}, **RANKS), None),
        compute_desired(owner(prefill={}, coordinator="10.0.0.1", **RANKS), None),
    )
    assert set(before.members) == {"prefill"}
    assert set(after.members) == {"prefill", "decode"}
    for each in (before, after):
        made = {(obj["kind"], obj["metadata"]["name"]) for obj in each.objects}
        assert {("Deployment", "demo-coordinator"), ("Service", "demo-coordinator")} <= made
    configured = [obj["metadata"]["name"] for obj in before.objects if obj["kind"] == "ConfigMap"]
    assert not any("decode" in name for name in configured)


def test_the_coordinator_stays_as_long_as_ranks_need_it() -> None:
    objects = [("Deployment", "demo-coordinator"), ("Service", "demo-coordinator")]
    assert set(objects) <= set(compute_desired(owner(), None).absent)
    assert not set(objects) & set(compute_desired(owner(), None, keep_coordinator=True).absent)


def test_what_makes_another_expert_group_and_what_only_another_revision() -> None:
    def template(address: str = "10.0.0.1", **spec: Any) -> MemberTemplate:
        return MemberTemplate(owner(coordinator=address, **{**RANKS, **spec}), "decode")

    ranks = template()
    annotation = ranks.pod(0)["metadata"]["annotations"][f"{GROUP}/expert-group"]
    assert annotation == ranks.expert_group
    for same in (template(image="other:1"), template(engine={"maxNumSeqs": 4})):
        assert same.revision != ranks.revision
        assert same.expert_group == ranks.expert_group
    for other in (
        template(address="10.0.0.2"),
        template(model={"uri": "file:///models/y"}),
        template(model={"uri": "file:///models/x", "dtype": "float32"}),
        template(engine={"device": "cpu"}),
        template(decode={"parallelism": {"expert": True, "tensor": 1}}),
    ):
        assert other.revision != ranks.revision
        assert other.expert_group != ranks.expert_group
    alone = MemberTemplate(owner(), "decode")
    assert alone.expert_group == ""
    assert "annotations" not in alone.pod(0)["metadata"]


def test_the_coordinator_is_one_restricted_pod_without_access_to_the_api() -> None:
    wanted = coordinator.deployment(owner(coordinator="10.0.0.1", **RANKS))
    spec = wanted["spec"]
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
        "path": "/healthz",
        "port": "http",
        "scheme": "HTTP",
    }
    assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"
    security = container["securityContext"]
    assert security["readOnlyRootFilesystem"]
    assert not security["allowPrivilegeEscalation"]
    service = coordinator.service(owner(**RANKS))["spec"]
    assert service["selector"].items() <= spec["template"]["metadata"]["labels"].items()
    assert [(port["port"], port["targetPort"]) for port in service["ports"]] == [
        (5560, "ranks"),
        (8001, "http"),
    ]
    members = MemberTemplate(owner(), "decode").pod(0)["metadata"]["labels"]
    assert not service["selector"].items() <= members.items()


def test_disruption_budget_only_for_groups_that_can_spare_a_pod_and_servers_that_know_it() -> None:
    assert disruption_budget(owner(), "decode", "policy/v1") is None
    budget = disruption_budget(owner(decode={"replicas": 3}), "decode", "policy/v1beta1")
    assert budget
    assert (budget["apiVersion"], budget["spec"]["minAvailable"]) == ("policy/v1beta1", 2)
    kinds = {obj["kind"] for obj in compute_desired(owner(decode={"replicas": 3}), None).objects}
    assert "PodDisruptionBudget" not in kinds


@pytest.mark.parametrize("role", ["prefill", "decode", "gateway"])
def test_a_group_of_several_keeps_all_but_one_pod_and_a_single_pod_holds_up_no_node(
    role: ConfiguredRole,
) -> None:
    def budgets(replicas: int) -> tuple[list[Any], list[tuple[str, str]]]:
        wanted = compute_desired(
            owner(**({"prefill": {}} | {role: {"replicas": replicas}})), "policy/v1"
        )
        found = [obj for obj in wanted.objects if obj["metadata"]["name"] == f"demo-{role}"]
        return [obj["spec"] for obj in found if obj["kind"] == "PodDisruptionBudget"], wanted.absent

    (several,), absent = budgets(3)
    selector = {f"{GROUP}/service": "demo", f"{GROUP}/role": role}
    assert several == {"minAvailable": 2, "selector": {"matchLabels": selector}}
    assert ("PodDisruptionBudget", f"demo-{role}") not in absent
    single, absent = budgets(1)
    assert single == []
    assert ("PodDisruptionBudget", f"demo-{role}") in absent


@pytest.mark.parametrize(
    ("text", "size"), [("7", 7), ("2Ki", 2048), ("3M", 3_000_000), ("1Ti", 2**40)]
)
def test_quantities(text: str, size: int) -> None:
    assert quantity_bytes(text) == size


def test_contains_ignores_what_the_server_adds_and_sees_what_it_lost() -> None:
    wanted = {"spec": {"ports": [{"port": 80}]}}
    assert contains(
        {"spec": {"ports": [{"port": 80, "nodePort": 1}], "x": 1}, "status": {}}, wanted
    )
    assert not contains({"spec": {"ports": [{"port": 81}]}}, wanted)
    assert not contains({"spec": {"ports": [{"port": 80}, {"port": 81}]}}, wanted)
