"""The rights that the chart grants to the operator: it needs all of them and no others.

The audit log of a real API server lists every request.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import helm_python as helm
import pytest
from kubernetes.client import ApiException

from baton_kube.client import Object
from baton_operator.api.crd import custom_resource_definition
from baton_operator.names import ANNOTATION_EXPERT_GROUP, GROUP, PLURAL, VERSION
from baton_operator.revision_history import LIMIT
from pocketkube.control_plane.real import RealControlPlane, find_assets, missing_assets
from support.install.release_cluster import CHART, RELEASE, Cluster
from support.operator.http_routes import ROUTES
from support.waiting import eventually


class Right(NamedTuple):
    """One verb on one resource (`pods`, `pods/status`) of one API group."""

    group: str
    resource: str
    verb: str


class Audit:
    """The requests of one user in an audit log."""

    def __init__(self, log: Path, user: str) -> None:
        events = (json.loads(line) for line in log.read_text().splitlines() if line.endswith("}"))
        self._events: list[Object] = [
            event for event in events if event["user"]["username"] == user
        ]

    @property
    def forbidden(self) -> list[str]:
        """The URIs of requests that were refused because of a missing right."""
        return sorted({event["requestURI"] for event in self._events if _code(event) == 403})

    @property
    def used(self) -> set[Right]:
        """The rights that the allowed requests needed.

        An apply that creates an object needs `create` and `patch`.
        """
        found = set()
        for event in self._events:
            if (reference := event.get("objectRef")) is None or _code(event) in (0, 403):
                continue
            resource = "/".join(filter(None, (reference["resource"], reference.get("subresource"))))
            verbs = {event["verb"]} | (
                {"create"} if event["verb"] == "patch" and _code(event) == 201 else set()
            )
            found |= {Right(reference.get("apiGroup", ""), resource, verb) for verb in verbs}
        return found


def _code(event: Object) -> int:
    return int((event.get("responseStatus") or {}).get("code", 0))


def granted(rules: list[Object]) -> set[Right]:
    """Return the rights that the rules of a role grant."""
    return {
        Right(group, resource, verb)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


SERVICE = "demo"
TIMEOUT_S = 60.0
UNSEEN = {
    # Checked by an admission plugin when an object with blockOwnerDeletion is created. There is
    # no request for it.
    Right(GROUP, f"{PLURAL}/finalizers", "update"),
}
BESIDE = [
    ("budget", "policy", "v1beta1", "poddisruptionbudgets"),
    ("policy", "networking.k8s.io", "v1", "networkpolicies"),
    ("ingress", "networking.k8s.io", "v1", "ingresses"),
    ("route", "gateway.networking.k8s.io", "v1", "httproutes"),
]


@pytest.fixture(scope="module")
def audit_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("audit") / "audit.log"


@pytest.fixture(scope="module")
def audited_plane(
    audit_log: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RealControlPlane]:
    """A real control plane with the admission plugin that checks blockOwnerDeletion."""
    assets = find_assets()
    if assets is None:
        if os.environ.get("BATON_REQUIRE_REAL_CONTROL_PLANE") == "1":
            pytest.fail(missing_assets())
        pytest.skip(f"no real control plane: {missing_assets()}")
    flags = ("--enable-admission-plugins=OwnerReferencesPermissionEnforcement",)
    plane = RealControlPlane(
        assets,
        tmp_path_factory.mktemp("audited-plane"),
        service_network="127.205.0.0/16",  # the operator's requests to Services stay on loopback
        audit_log=audit_log,
        apiserver_flags=flags,
    )
    plane.start(timeout_s=120)
    try:
        yield plane
    finally:
        plane.stop()


class Services:
    """Acts as the user and the kubelet of one namespace, with an administrator's rights."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self.cluster, self.namespace = cluster, namespace

    def get(self) -> Object:
        found: Object = self.cluster.custom.get_namespaced_custom_object(
            GROUP, VERSION, self.namespace, PLURAL, SERVICE
        )
        return found

    def patch(self, **spec: Any) -> None:
        body = {"spec": spec}
        self.cluster.custom.patch_namespaced_custom_object(
            GROUP, VERSION, self.namespace, PLURAL, SERVICE, body
        )

    def secrets(self) -> set[str]:
        found = {
            secret.metadata.name
            for secret in self.cluster.core.list_namespaced_secret(self.namespace).items
        }
        return {name for name in found if name.endswith("-key")}

    def members(self) -> set[str]:
        names = self.cluster.pods(self.namespace)
        return {
            name.removeprefix(f"{SERVICE}-")
            for name in names
            if "-gateway-" not in name and "-coordinator-" not in name
        }

    def uids(self, role: str) -> dict[str, str]:
        """Return the uids of a role's members by name."""
        selector = f"{GROUP}/service={SERVICE},{GROUP}/role={role}"
        found = self.cluster.core.list_namespaced_pod(self.namespace, label_selector=selector).items
        return {pod.metadata.name: pod.metadata.uid for pod in found}

    def has_another(self, gone: str) -> bool:
        """Return whether two prefill pods exist and none has the uid `gone`."""
        uids = self.uids("prefill").values()
        return len(uids) == 2 and gone not in uids

    def beside(self) -> set[str]:
        """Return the objects that exist only for some specs."""
        found = []
        for what, group, version, plural in BESIDE:
            answer = self.cluster.custom.list_namespaced_custom_object(
                group, version, self.namespace, plural
            )
            found += [f"{what} {item['metadata']['name']}" for item in answer["items"]]
        deployments = self.cluster.apps.list_namespaced_deployment(self.namespace).items
        found += [
            f"deployment {each.metadata.name}"
            for each in deployments
            if "coordinator" in each.metadata.name
        ]
        return {name.replace(f"{SERVICE}-", "") for name in found}

    def run_members(self) -> None:
        """Report pending pods as running and ready. No process listens at their address.

        Ranks stay pending. A started rank leaves only by a topology, which needs a coordinator.
        """
        state = {"running": {"startedAt": "2020-01-01T00:00:00Z"}}
        container = {
            "name": "engine",
            "image": "x",
            "imageID": "x",
            "restartCount": 0,
            "ready": True,
            "started": True,
        }
        status = {
            "phase": "Running",
            "podIP": "127.203.0.1",
            "podIPs": [{"ip": "127.203.0.1"}],
            "containerStatuses": [{**container, "state": state}],
            "conditions": [{"type": "Ready", "status": "True"}],
        }
        for pod in self.cluster.core.list_namespaced_pod(
            self.namespace, label_selector=f"{GROUP}/member=true"
        ).items:
            if pod.status.phase == "Pending" and not _is_rank(pod):
                with contextlib.suppress(ApiException):  # the pod was deleted
                    name = pod.metadata.name
                    self.cluster.core.patch_namespaced_pod_status(
                        name, self.namespace, {"status": status}
                    )

    def has_rank(self) -> bool:
        """Return whether a pod of an expert-parallel group exists."""
        return any(map(_is_rank, self.cluster.core.list_namespaced_pod(self.namespace).items))

    def take_name(self, member: str) -> None:
        """Create a pod with the member's name that the service does not own."""
        spec = {"containers": [{"name": "x", "image": "x"}]}
        self.cluster.core.create_namespaced_pod(
            self.namespace, {"metadata": {"name": f"{SERVICE}-{member}"}, "spec": spec}
        )

    def reason(self) -> str:
        """Return the reason of the Ready condition."""
        conditions = self.get().get("status", {}).get("conditions", [])
        return str(next((c["reason"] for c in conditions if c["type"] == "Ready"), ""))

    def has_rolled_out(self) -> bool:
        """Return whether the only decode pod is of the newest spec and ready."""
        service = self.get()
        status = service["status"]
        decode = status["decode"]
        return (
            status["observedGeneration"] == service["metadata"]["generation"]
            and len(self.uids("decode")) == decode["updated"] == decode["ready"] == 1
        )

    def newest_record(self) -> int | None:
        """Return maxNumSeqs of the newest recorded spec."""
        found = self.cluster.apps.list_namespaced_controller_revision(self.namespace).items
        newest = max(found, key=lambda each: each.revision, default=None)
        return (
            None if newest is None else (newest.data["spec"].get("engine") or {}).get("maxNumSeqs")
        )

    def config_maps(self, role: str) -> list[str]:
        selector = f"{GROUP}/service={SERVICE},{GROUP}/role={role}"
        found = self.cluster.core.list_namespaced_config_map(
            self.namespace, label_selector=selector
        ).items
        return [config_map.metadata.name for config_map in found]

    def until(self, probe: Callable[[], Any], wanted: Any, log: Path) -> None:
        def same() -> bool:
            self.run_members()
            seen = probe()
            conditions = [
                (c["reason"], c["message"])
                for c in self.get().get("status", {}).get("conditions", [])
            ]
            assert seen == wanted, f"{seen}, not {wanted}; {conditions}; {log.read_text()[-1500:]}"
            return True

        eventually(same, timeout_s=TIMEOUT_S, what=str(wanted))


def _is_rank(pod: Any) -> bool:
    return ANNOTATION_EXPERT_GROUP in (pod.metadata.annotations or {})


def run_all_actions(services: Services, log: Path) -> None:
    """Make the operator perform every kind of action once."""
    beside = {"policy members", *(f"budget {role}" for role in ("prefill", "decode", "gateway"))}
    services.until(services.members, {"prefill-0", "prefill-1", "decode-0", "decode-1"}, log)
    services.until(services.beside, {*beside, "ingress gateway"}, log)
    services.patch(
        gateway={
            "ingress": None,
            "httpRoute": {"parentRefs": [{"name": "edge"}], "hostnames": ["a.example"]},
        }
    )
    services.until(services.beside, {*beside, "route gateway"}, log)
    services.until(services.secrets, {f"{SERVICE}-key"}, log)

    # Two deletions, so that one Event is counted twice. A replacement has the name of the deleted
    # pod, or the next name if it is created before the pod is gone.
    for _ in range(2):
        name, uid = max(services.uids("prefill").items())
        services.cluster.core.delete_namespaced_pod(
            name, services.namespace, grace_period_seconds=0
        )
        services.until(functools.partial(services.has_another, uid), True, log)

    # Another client's pod has the name of the next member.
    services.take_name("decode-2")
    services.patch(decode={"replicas": 3})
    services.until(services.reason, "NameConflict", log)
    services.cluster.core.delete_namespaced_pod(
        f"{SERVICE}-decode-2", services.namespace, grace_period_seconds=0
    )
    services.until(
        services.members, {"prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2"}, log
    )

    # The smallest service, without optional objects.
    services.patch(
        prefill={"replicas": 1},
        decode={"replicas": 1},
        gateway={"replicas": 1, "httpRoute": None},
        security={"networkPolicy": False},
    )
    services.until(services.members, {"prefill-0", "decode-0"}, log)
    services.until(services.beside, set(), log)

    # Another configuration, then an expert-parallel group and back.
    before = services.config_maps("decode")
    services.patch(engine={"maxNumSeqs": 7})
    services.until(lambda: set(services.config_maps("decode")) & set(before), set(), log)
    for number in range(8, 8 + LIMIT):  # more specs than the history keeps
        services.patch(engine={"maxNumSeqs": number})
        services.until(services.newest_record, number, log)
    services.until(services.has_rolled_out, True, log)
    services.patch(decode={"parallelism": {"expert": True}})
    services.until(services.beside, {"deployment coordinator"}, log)
    services.until(services.has_rank, True, log)
    services.patch(decode={"parallelism": {"expert": False}})
    services.until(services.beside, set(), log)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("scope", ["cluster", "namespace"])
def test_the_chart_grants_exactly_the_rights_that_the_operator_uses(
    scope: str, audited_plane: RealControlPlane, audit_log: Path, tmp_path: Path
) -> None:
    cluster = Cluster(audited_plane.kubeconfig, tmp_path)
    known = {
        crd.metadata.name for crd in cluster.definitions.list_custom_resource_definition().items
    }
    for crd in (ROUTES, custom_resource_definition()):
        if crd["metadata"]["name"] not in known:
            cluster.definitions.create_custom_resource_definition(crd)
    team = cluster.new_namespace()
    values: Object = {
        "crds": {"install": False},
        **({"watchNamespaces": [team]} if scope == "namespace" else {}),
    }
    with helm.Config(kubeconfig_path=cluster.kubeconfig, namespace=cluster.namespace) as releases:
        releases.install(CHART, RELEASE, values, create_namespace=True, timeout=60)
        try:
            eventually(cluster.crd, timeout_s=30, what="the CRD to be served")
            cluster.create_service(team, SERVICE)
            services = Services(cluster, team)
            services.patch(
                prefill={"replicas": 2},
                decode={"replicas": 2},
                gateway={"replicas": 2, "ingress": {"host": "a.example"}},
                drainTimeoutSeconds=0,
            )
            with cluster.operator("--leader-elect", "--lease-namespace", cluster.namespace) as log:
                run_all_actions(services, log)
            if scope == "namespace":
                assert not [
                    r
                    for r in cluster.rbac.list_cluster_role().items
                    if r.metadata.name.startswith(RELEASE)
                ]
                rules = roles(cluster, team, cluster.namespace)
            else:
                rules = cluster.rbac.read_cluster_role(f"{RELEASE}-operator").rules
                rules = [cluster.rbac.api_client.sanitize_for_serialization(rule) for rule in rules]
                rules += roles(cluster, cluster.namespace)
        finally:
            releases.uninstall(RELEASE, ignore_not_found=True)
    audit = Audit(audit_log, f"system:serviceaccount:{cluster.namespace}:{RELEASE}-operator")
    assert audit.forbidden == [], log.read_text()[-3000:]
    assert "forbidden" not in log.read_text().lower(), log.read_text()
    assert audit.used, "the log has no request of the operator"
    assert granted(rules) - audit.used - UNSEEN == set()


def roles(cluster: Cluster, *namespaces: str) -> list[Object]:
    """Rules of the release's Roles."""
    found = [
        role
        for namespace in namespaces
        for role in cluster.rbac.list_namespaced_role(namespace).items
    ]
    mine = [role for role in found if role.metadata.name.startswith(f"{RELEASE}-operator")]
    return [
        cluster.rbac.api_client.sanitize_for_serialization(rule)
        for role in mine
        for rule in role.rules
    ]
