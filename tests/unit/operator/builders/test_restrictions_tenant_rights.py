"""A restricted LLMService: its creator can do only what docs/operate/security.md states."""

from __future__ import annotations

from typing import Any

from baton_kube.client import Object
from baton_operator.builders.restrictions import Restrictions
from baton_operator.reconcile.desired import compute_desired
from support.operator.services import resolved

HUB = {"uri": "hf://acme/x"}
IMAGE = "attacker.example/x:1"


def objects(**spec: Any) -> list[Object]:
    """Return the objects of a restricted service, and its first decode pod."""
    service = resolved(restrictions=Restrictions(), image=IMAGE, **{"model": HUB, **spec})
    desired = compute_desired(service, "policy/v1", http_routes=True)
    return [*desired.objects, desired.members["decode"].pod(0)]


def one(kind: str, **spec: Any) -> Object:
    (found,) = [obj for obj in objects(**spec) if obj["kind"] == kind]
    return found


def pod(**spec: Any) -> Object:
    return dict(one("Pod", **spec)["spec"])


def gateway_pod(**spec: Any) -> Object:
    return dict(one("Deployment", **spec)["spec"]["template"]["spec"])


def decode(**spec: Any) -> Object:
    return {"template": {"spec": spec}}


def test_the_image_of_a_tenant_reads_every_secret_of_the_namespace() -> None:
    (fetcher,) = pod(model={**HUB, "credentialsSecret": "any"})["initContainers"]
    assert fetcher["image"] == IMAGE
    assert fetcher["envFrom"] == [{"secretRef": {"name": "any"}}]
    for field in ("apiKeys", "tls"):
        made = gateway_pod(gateway={field: {"secretName": "any"}})
        assert made["containers"][0]["image"] == IMAGE
        assert "any" in [v["secret"]["secretName"] for v in made["volumes"] if "secret" in v]


def test_a_tenant_mounts_every_claim_and_config_map_of_the_namespace() -> None:
    assert "any" in str(pod(model={"uri": "pvc://any/x"})["volumes"])
    volumes = [
        {"name": "a", "persistentVolumeClaim": {"claimName": "any"}},
        {"name": "b", "configMap": {"name": "any"}},
    ]
    assert pod(decode=decode(volumes=volumes))["volumes"][-2:] == volumes


def test_a_tenant_pulls_images_with_every_secret_of_the_namespace() -> None:
    pull = [{"name": "any"}]
    assert pod(decode=decode(imagePullSecrets=pull))["imagePullSecrets"] == pull


def test_the_image_of_a_tenant_has_the_token_of_the_gateway_which_lists_pods_and_services() -> None:
    made = gateway_pod()
    assert made["serviceAccountName"] == "demo-gateway"
    (token,) = [each["name"] for each in made["volumes"] if "serviceAccountToken" in str(each)]
    container = made["containers"][0]
    assert container["image"] == IMAGE
    assert token in [mount["name"] for mount in container["volumeMounts"]]
    assert one("Role")["rules"] == [
        {"apiGroups": [""], "resources": ["pods", "services"], "verbs": ["list", "watch"]}
    ]
    assert one("RoleBinding")["subjects"][0]["name"] == "demo-gateway"


def test_a_tenant_chooses_labels_hosts_nodes_and_amounts() -> None:
    labels = {"decode": {"template": {"metadata": {"labels": {"app": "other"}}}}}
    assert one("Pod", **labels)["metadata"]["labels"]["app"] == "other"
    rules = one("Ingress", gateway={"ingress": {"host": "bank.example"}})["spec"]["rules"]
    assert rules[0]["host"] == "bank.example"
    route = {"parentRefs": [{"name": "edge", "namespace": "other"}], "hostnames": ["bank.example"]}
    made = one("HTTPRoute", gateway={"httpRoute": route})["spec"]
    assert made["hostnames"] == ["bank.example"]
    assert made["parentRefs"][0]["namespace"] == "other"
    chosen: Object = {
        "tolerations": [{"operator": "Exists"}],
        "nodeSelector": {"node-role.kubernetes.io/control-plane": ""},
        "priorityClassName": "high",
    }
    assert chosen.items() <= pod(decode=decode(**chosen)).items()
    limits = {"limits": {"nvidia.com/gpu": 8}}
    assert pod(decode={"resources": limits})["containers"][0]["resources"] == limits
