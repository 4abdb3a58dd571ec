"""Every sample builds the objects that its header states."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import yaml

from baton_kube.client import Object
from baton_operator import names
from baton_operator.api import llmservice
from baton_operator.builders import config_maps, coordinator_deployment
from baton_operator.builders.gateway import gateway_deployment
from baton_operator.builders.member_pods import MemberTemplate
from baton_operator.builders.resolved_service import ResolvedService
from baton_operator.builders.restrictions import Restrictions
from baton_operator.reconcile.desired import compute_desired
from pocketkube.apiserver.schema.structural import StructuralSchema
from support.install.rendered_chart import ROOT

SAMPLES = {path.stem: path for path in sorted((ROOT / "manifests/samples").glob("*.yaml"))}
CRD = yaml.safe_load((ROOT / "manifests/crd/llmservices.yaml").read_text())
SCHEMA = StructuralSchema(CRD["spec"]["versions"][0]["schema"]["openAPIV3Schema"])


def sample(name: str) -> Object:
    document: Object = yaml.safe_load(SAMPLES[name].read_text())
    return document


def resolved(name: str) -> ResolvedService:
    """Return the service as the API server would store it."""
    document = SCHEMA.default(sample(name))
    spec = llmservice.decode_spec(document["spec"])
    return ResolvedService(
        name=document["metadata"]["name"],
        namespace="default",
        uid="u",
        spec=spec,
        coordinator="10.0.0.1",
    )


def member(name: str, role: names.MemberRole) -> Object:
    """Return the first pod of the role. Its only container is `engine`."""
    pod = MemberTemplate(resolved(name), role).pod(0)
    (container,) = pod["spec"]["containers"]
    assert container["name"] == "engine"
    return pod


def gpus(pod: Object) -> int:
    return int(
        pod["spec"]["containers"][0].get("resources", {}).get("limits", {}).get("nvidia.com/gpu", 0)
    )


def test_the_samples_have_different_service_names() -> None:
    assert set(SAMPLES) == {"demo", "experts", "cpu", "one-gpu", "one-node", "many-nodes"}
    service_names = [sample(name)["metadata"]["name"] for name in SAMPLES]
    assert len(set(service_names)) == len(service_names), (
        "two samples in one namespace would be one service"
    )


@pytest.mark.parametrize("name", SAMPLES)
def test_the_operator_builds_all_objects_of_a_sample(name: str) -> None:
    service = resolved(name)
    roles: list[names.MemberRole] = ["decode", "prefill"] if service.has_prefill else ["decode"]
    for role in roles:
        assert member(name, role)["spec"]["containers"][0]["image"] == service.spec.image
        assert config_maps.engine_config(service, role).model.path
        size = service.tensor_parallel_size(role)
        assert gpus(member(name, role)) == (size if service.spec.engine.device == "cuda" else 0)
    assert gateway_deployment.build(service)["spec"]["replicas"] == service.spec.gateway.replicas
    if service.is_expert_parallel:
        assert coordinator_deployment.build(service)["spec"]["replicas"] == 1


@pytest.mark.parametrize("name", SAMPLES)
def test_a_restricted_operator_accepts_the_samples(name: str) -> None:
    """The models of the samples for `baton up` are in a folder of the node."""
    service = resolved(name)
    is_local = service.spec.model.uri.startswith("file://")
    folders = ("/models/",) if is_local else ()
    allowed = Restrictions(host_paths=folders)
    compute_desired(msgspec.structs.replace(service, restrictions=allowed), "policy/v1")
    assert is_local == (name in ("demo", "experts"))


def test_the_sample_one_gpu_uses_one_gpu() -> None:
    service = resolved("one-gpu")
    assert (service.has_prefill, service.replicas("decode"), gpus(member("one-gpu", "decode"))) == (
        False,
        1,
        1,
    )


def test_the_sample_one_node_uses_the_eight_gpus_of_one_host() -> None:
    service = resolved("one-node")
    roles: tuple[names.MemberRole, ...] = ("prefill", "decode")
    assert sum(service.replicas(role) * gpus(member("one-node", role)) for role in roles) == 8
    for role in roles:
        pod = member("one-node", role)
        (term,) = pod["spec"]["affinity"]["podAffinity"][
            "requiredDuringSchedulingIgnoredDuringExecution"
        ]
        assert term["topologyKey"] == "kubernetes.io/hostname"
        selected: dict[str, Any] = term["labelSelector"]["matchLabels"]
        assert selected.items() <= pod["metadata"]["labels"].items(), (
            "the affinity must select the pod itself, or the first pod is never scheduled"
        )
        mounts = {
            mount["mountPath"]: mount["name"]
            for mount in pod["spec"]["containers"][0]["volumeMounts"]
        }
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
        assert {"/etc/baton", "/models/models", "/tmp"} <= set(mounts), (
            "the overlay replaced mounts of the operator"
        )


def test_the_sample_many_nodes_is_one_group_spread_over_hosts() -> None:
    service, pod = resolved("many-nodes"), member("many-nodes", "decode")
    assert (service.is_expert_parallel, service.replicas("decode")) == (True, 16)
    (spread,) = pod["spec"]["topologySpreadConstraints"]
    assert spread["labelSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    # An engine of a group on GPUs refuses to start without num_blocks.
    assert config_maps.engine_config(service, "decode").cache.num_blocks is not None


def test_the_sample_cpu_requests_a_cpu_per_thread() -> None:
    service = resolved("cpu")
    for role in ("prefill", "decode"):
        resources = member("cpu", role)["spec"]["containers"][0]["resources"]
        assert int(resources["requests"]["cpu"]) == service.spec.engine.num_threads
