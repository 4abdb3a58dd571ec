"""Problems that the operator process reports in conditions."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from baton_kube.client import KubeError, Object
from baton_operator.api.crd import custom_resource_definition
from baton_operator.kube.objects import Kube
from support.operator.http_routes import ROUTES
from support.operator.operator_process import NAMESPACE, Cluster, needs_api_server
from support.waiting import until

pytestmark = needs_api_server


async def test_objects_of_other_owners_are_not_changed(kube: Kube) -> None:
    metadata = {"name": "taken-gateway", "namespace": NAMESPACE}
    ports = [{"port": 1234}]
    await kube.create(
        {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": {"ports": ports}}
    )
    taken = Cluster(kube, "taken")
    await taken.create()
    condition = await taken.condition("Ready", "False", "NameConflict")
    assert "Service taken-gateway" in condition["message"]
    foreign = await kube.read("Service", NAMESPACE, "taken-gateway")
    assert foreign["spec"]["ports"][0]["port"] == 1234
    await kube.delete("Service", NAMESPACE, "taken-gateway", foreign["metadata"]["uid"])
    await taken.names("decode-0")


async def test_a_surge_beyond_a_quota_is_reported_and_continues_when_there_is_room(
    kube: Kube,
) -> None:
    gpu = "example.com/quota-gpu"
    path = f"/api/v1/namespaces/{NAMESPACE}/resourcequotas"
    hard = {f"requests.{gpu}": "1"}
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "gpus"},
        "spec": {"hard": hard},
    }
    await kube.client.create(path, quota)

    async def allow(number: int, used: int) -> None:
        """Set the quota's status, as the quota controller does."""
        hard[f"requests.{gpu}"] = str(number)
        body = {
            "spec": {"hard": hard},
            "status": {"hard": hard, "used": {f"requests.{gpu}": str(used)}},
        }
        for subresource in ("", "/status"):
            await kube.client.merge(f"{path}/gpus{subresource}", body)

    async def refuses(number: int) -> bool:
        container = {"name": "c", "image": "i", "resources": {"limits": {gpu: str(number)}}}
        pod = {
            "metadata": {"name": "probe", "namespace": NAMESPACE},
            "spec": {"containers": [container]},
        }
        try:
            await kube.client._request(
                "create", "POST", kube.path("Pod", NAMESPACE), body=pod, query=[("dryRun", "All")]
            )
        except KubeError as error:
            return "exceeded quota" in str(error)
        return False

    await allow(1, used=0)
    await until(lambda: refuses(2), "the quota to count")
    narrow = Cluster(kube, "narrow")
    await narrow.create(
        decode={"resources": {"limits": {gpu: "1"}}, "replicas": 1}, prefill={"replicas": 1}
    )
    await narrow.names("decode-0", "prefill-0")
    await narrow.run("decode-0")
    await narrow.run("prefill-0", ip="127.201.0.2")
    await narrow.condition("DecodeReady", "True", "PodsReady")
    await narrow.patch({"decode": {"template": {"metadata": {"labels": {"another": "revision"}}}}})
    has_event = await narrow.condition("DecodeReady", "False", "QuotaExceeded")
    assert f"requests.{gpu}=1" in has_event["message"]
    assert (await narrow.condition("Updating", "True"))["reason"] == "WaitingForCapacity"
    await narrow.condition("PrefillReady", "True", "PodsReady")
    assert set(await narrow.pods()) == {"narrow-decode-0", "narrow-prefill-0"}
    await allow(2, used=1)
    await narrow.names("decode-0", "decode-1", "prefill-0")
    await narrow.condition("DecodeReady", "False", "Progressing")
    await kube.client.delete(f"{path}/gpus")


async def test_a_secret_of_another_owner_is_neither_used_nor_changed(kube: Kube) -> None:
    foreign = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "lent-key", "namespace": NAMESPACE},
        "data": {"key": base64.b64encode(b"theirs").decode()},
    }
    await kube.create(foreign)
    service = Cluster(kube, "lent")
    await service.create(prefill={}, decode={"replicas": 1})
    condition = await service.condition("Ready", "False", "NameConflict")
    assert "Secret lent-key" in condition["message"]
    assert await service.pods() == {}
    found = await kube.read("Secret", NAMESPACE, "lent-key")
    assert found["data"] == foreign["data"]


async def test_an_own_secret_without_a_key_is_reported(kube: Kube) -> None:
    service = Cluster(kube, "keyless")
    await service.create()
    await service.names("decode-0")
    drawn = await kube.read("Secret", NAMESPACE, "keyless-key")
    emptied = {
        "metadata": {
            key: drawn["metadata"][key] for key in ("name", "namespace", "ownerReferences")
        }
    }

    async def is_replaced() -> bool:
        if found := await kube.read("Secret", NAMESPACE, "keyless-key"):
            await kube.delete("Secret", NAMESPACE, "keyless-key", found["metadata"]["uid"])
        try:
            await kube.create({"apiVersion": "v1", "kind": "Secret", **emptied})
        except KubeError as error:
            if error.status == 409:
                return False  # the operator replaced it already
            raise
        return True

    await until(is_replaced, "the Secret to be replaced before the operator draws another key")
    condition = await service.condition("Ready", "False", "ServiceKeyUnusable")
    assert "keyless-key" in condition["message"]
    assert "delete it" in condition["message"]


async def test_a_spec_that_an_older_api_server_accepts_is_reported(kube: Kube) -> None:
    """Before Kubernetes 1.25 schemas have no rules, so the operator checks the stored objects."""
    definition = (
        "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/llmservices.serving.baton.dev"
    )
    wrong = {"model": {"uri": "ftp://h/m"}, "gateway": {"limits": {"maxConcurrentPerKey": 1}}}
    bad = Cluster(kube, "brokenrule")
    await bad.create()
    await bad.names("decode-0")

    async def is_accepted() -> bool:
        try:
            await bad.patch(wrong)
        except KubeError as error:
            if error.status == 422:
                return False  # the definition is stored, but not yet used
            raise
        return True

    await kube.client.replace(definition, await with_rules(kube, definition, False))
    try:
        await until(is_accepted, "the schema without rules to be in force")
        condition = await bad.condition("Ready", "False", "InvalidSpec")
    finally:
        await kube.client.replace(definition, await with_rules(kube, definition, True))
    assert "model: uri must be file:///DIR, pvc://CLAIM/DIR, hf://ORG/" in condition["message"]
    assert "gateway: limits.maxConcurrentPerKey needs apiKeys" in condition["message"]
    assert "brokenrule-decode-0" in await bad.pods(), "running pods were changed"


async def test_only_the_route_waits_for_the_gateway_api(kube: Kube) -> None:
    routed = Cluster(kube, "routed")
    await routed.create(
        gateway={"httpRoute": {"parentRefs": [{"name": "public"}], "hostnames": ["a.example"]}}
    )
    condition = await routed.condition("Ready", "False", "GatewayAPIMissing")
    assert "spec.gateway.httpRoute" in condition["message"]
    await routed.names("decode-0")
    await kube.client.create("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", ROUTES)

    async def route() -> Object | None:
        return await kube.read("HTTPRoute", NAMESPACE, "routed-gateway")

    async def written() -> Any:
        return await route()

    found = await until(written, "the route to be written")
    assert found["spec"]["hostnames"] == ["a.example"]
    await routed.run("decode-0")
    await routed.run_gateway()
    await routed.condition("GatewayReady", "False", "RoutePending")
    refusal = {
        "type": "Accepted",
        "status": "False",
        "reason": "NotAllowedByListeners",
        "message": "not from here",
    }
    parents = [{"parentRef": {"name": "public"}, "conditions": [refusal]}]
    await kube.merge("HTTPRoute", NAMESPACE, "routed-gateway", {"status": {"parents": parents}})
    condition = await routed.condition("Ready", "False", "RouteNotAccepted")
    assert (
        "Gateway public: Accepted is False, NotAllowedByListeners: not from here"
        in condition["message"]
    )
    parents[0]["conditions"] = [
        {"type": "Accepted", "status": "True", "reason": "Accepted", "message": ""}
    ]
    await kube.merge("HTTPRoute", NAMESPACE, "routed-gateway", {"status": {"parents": parents}})
    await routed.condition("GatewayReady", "True", "PodsReady")
    await routed.patch({"gateway": {"httpRoute": None}})

    async def is_gone() -> bool:
        return await route() is None

    await until(is_gone, "the route to be deleted")


async def with_rules(kube: Kube, path: str, rules: bool) -> Object:
    """Replace the stored definition by one with or without rules."""
    stored: Object = await kube.client.get(path)
    stored["spec"]["versions"] = custom_resource_definition(rules=rules)["spec"]["versions"]
    return stored


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"model": {}}, "spec.model.uri"),
        ({"model": {"uri": "file:///models/x", "dtype": "int3"}}, "spec.model.dtype"),
        ({"decode": {"replicas": -1}}, "spec.decode.replicas"),
        ({"decode": {"parallelism": {"tensor": 0}}}, "spec.decode.parallelism.tensor"),
        (
            {"decode": {"parallelism": {"redundantExperts": -1}}},
            "spec.decode.parallelism.redundantExperts",
        ),
        ({"engine": {"kvCacheMemory": "lots"}}, "spec.engine.kvCacheMemory"),
        ({"kvTransfer": {"transport": "pigeon"}}, "spec.kvTransfer.transport"),
    ],
)
async def test_an_invalid_spec_is_refused_with_the_field(
    kube: Kube, spec: Object, field: str
) -> None:
    with pytest.raises(KubeError, match=field.replace(".", r"\.")) as refused:
        await Cluster(kube, "wrong").create(**spec)
    assert refused.value.status == 422
