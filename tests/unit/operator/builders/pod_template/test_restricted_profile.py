"""A restricted template cannot make pods that the restricted profile or Baton's accounts forbid."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from baton_kube.client import Object
from baton_operator.builders.gateway import gateway_deployment
from baton_operator.builders.member_pods import MemberTemplate
from baton_operator.builders.pod_template.overlay import merge
from baton_operator.builders.restrictions import Restrictions
from support.operator.pod_security import SYSCTLS, violations
from support.operator.services import resolved

CLAIM = {"uri": "pvc://models/x"}
SAFE = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
SETTING = "the operator's setting templates is restricted"


def pod_of(role: str, template: Object, restrictions: Restrictions | None, **spec: Any) -> Object:
    """Return the pod, or pod template, of `role` with this overlay."""
    fields = {"model": CLAIM, "prefill": {}, **spec}
    fields[role] = {**fields.get(role, {}), "template": template}
    service = resolved(restrictions=restrictions, **fields)
    if role == "gateway":
        made: Object = gateway_deployment.build(service)["spec"]["template"]
        return made
    return MemberTemplate(service, "prefill" if role == "prefill" else "decode").pod(0)


def engine(**fields: Any) -> Object:
    return {"containers": [{"name": "engine", **fields}]}


def sidecar(**fields: Any) -> Object:
    return {"containers": [{"name": "engine"}, {"name": "x", "image": "i", **fields}]}


def volume(**source: Any) -> Object:
    return {"volumes": [{"name": "v", **source}]}


def env(**source: Any) -> list[Object]:
    return [{"name": "A", "valueFrom": source}]


def projected(**source: Any) -> Object:
    return volume(projected={"sources": [source]})


#: Attacks of a user who may create LLMServices, and no pods: the pod spec of a template, and the
#: path of the refused field in it.
ATTACKS: list[tuple[Object, str]] = [
    # The node.
    ({"hostNetwork": True}, "hostNetwork"),
    ({"hostPID": True}, "hostPID"),
    ({"hostIPC": True}, "hostIPC"),
    ({"nodeName": "control-plane"}, "nodeName"),
    (volume(hostPath={"path": "/"}), "volumes[v]"),
    (volume(nfs={"server": "s", "path": "/"}), "volumes[v]"),
    (volume(flexVolume={"driver": "d"}), "volumes[v]"),
    ({"volumes": [{"name": "config", "configMap": None, "hostPath": {"path": "/"}}]}, "volumes[c"),
    ({"volumes": [{"name": "model", "hostPath": {"path": "/etc"}}]}, "volumes[model]"),
    (engine(ports=[{"name": "http", "containerPort": 8000, "hostPort": 80}]), "containers[engine]"),
    *(
        (
            {containers: [{"name": "y", "securityContext": SAFE, "ports": [{"hostPort": 22}]}]},
            f"{containers}[y].ports[0].hostPort",
        )
        for containers in ("containers", "initContainers", "ephemeralContainers")
    ),
    (engine(livenessProbe={"httpGet": {"host": "169.254.169.254"}}), "containers[engine].liveness"),
    (
        sidecar(securityContext=SAFE, lifecycle={"preStop": {"tcpSocket": {"host": "h"}}}),
        "containers[x].lifecycle.preStop.tcpSocket.host",
    ),
    # The user and the kernel.
    ({"securityContext": {"runAsUser": 0}}, "securityContext.runAsUser"),
    ({"securityContext": {"runAsNonRoot": False}}, "securityContext.runAsNonRoot"),
    ({"securityContext": {"runAsNonRoot": None}}, "securityContext.runAsNonRoot"),
    ({"securityContext": {"seccompProfile": {"type": "Unconfined"}}}, "securityContext.seccompP"),
    ({"securityContext": {"seccompProfile": None}}, "securityContext.seccompProfile"),
    ({"securityContext": None}, "securityContext.runAsNonRoot"),
    (
        {"securityContext": {"sysctls": [{"name": "kernel.msgmax", "value": "1"}]}},
        "securityContext.sysctls[kernel.msgmax].name",
    ),
    ({"securityContext": {"seLinuxOptions": {"type": "spc_t"}}}, "securityContext.seLinuxOptions"),
    ({"securityContext": {"seLinuxOptions": {"user": "u"}}}, "securityContext.seLinuxOptions.user"),
    ({"securityContext": {"seLinuxOptions": {"role": "r"}}}, "securityContext.seLinuxOptions.role"),
    ({"securityContext": {"appArmorProfile": {"type": "Unconfined"}}}, "securityContext.appArmor"),
    ({"securityContext": {"windowsOptions": {"hostProcess": True}}}, "securityContext.windowsOpt"),
    *(
        (engine(securityContext=context), f"containers[engine].securityContext.{path}")
        for context, path in (
            ({"privileged": True}, "privileged"),
            ({"allowPrivilegeEscalation": True}, "allowPrivilegeEscalation"),
            ({"allowPrivilegeEscalation": None}, "allowPrivilegeEscalation"),
            ({"runAsUser": 0}, "runAsUser"),
            ({"runAsNonRoot": False}, "runAsNonRoot"),
            ({"procMount": "Unmasked"}, "procMount"),
            ({"seccompProfile": {"type": "Unconfined"}}, "seccompProfile"),
            ({"seLinuxOptions": {"type": "spc_t"}}, "seLinuxOptions.type"),
            ({"appArmorProfile": {"type": "Unconfined"}}, "appArmorProfile.type"),
            ({"windowsOptions": {"hostProcess": True}}, "windowsOptions.hostProcess"),
            ({"capabilities": {"add": ["SYS_ADMIN"]}}, "capabilities.add"),
            ({"capabilities": {"drop": []}}, "capabilities.drop"),
            ({"capabilities": None}, "capabilities.drop"),
        )
    ),
    # Further containers.
    (sidecar(), "containers[x].securityContext.allowPrivilegeEscalation"),
    (sidecar(securityContext={**SAFE, "privileged": True}), "containers[x].securityContext.priv"),
    ({"initContainers": [{"name": "i", "image": "i"}]}, "initContainers[i].securityContext"),
    ({"ephemeralContainers": [{"name": "e", "image": "i"}]}, "ephemeralContainers[e].securityC"),
    # Accounts and their tokens.
    ({"serviceAccountName": "deployer"}, "serviceAccountName"),
    ({"serviceAccountName": None}, "serviceAccountName"),
    ({"serviceAccount": "deployer"}, "serviceAccount"),
    ({"automountServiceAccountToken": True}, "automountServiceAccountToken"),
    (projected(serviceAccountToken={"path": "token"}), "volumes[v].projected.sources[0]"),
    (projected(podCertificate={"signerName": "s"}), "volumes[v].projected.sources[0]"),
    # Secrets.
    (volume(secret={"secretName": "theirs"}), "volumes[v].secret"),
    (volume(secret={"secretName": {"name": "theirs"}}), "volumes[v].secret must"),
    (projected(secret={"name": "theirs"}), "volumes[v].projected.sources[0].secret"),
    (
        projected(secret={"name": "theirs", "secretName": "clients"}),
        "volumes[v].projected.sources[0].secret",
    ),
    (volume(csi={"driver": "d", "nodePublishSecretRef": {"name": "theirs"}}), "volumes[v] must"),
    (
        volume(
            csi={
                "driver": "secrets-store.csi.k8s.io",
                "volumeAttributes": {"secretProviderClass": "theirs"},
            }
        ),
        "volumes[v] must",
    ),
    ({"volumes": [{"name": "service-key", "secret": {"secretName": "theirs"}}]}, "volumes[servi"),
    (
        engine(env=env(secretKeyRef={"name": "theirs", "key": "k"})),
        "containers[engine].env[A].valueFrom.secretKeyRef",
    ),
    (
        engine(envFrom=[{"secretRef": {"name": "theirs"}}]),
        "containers[engine].envFrom[0].secretRef",
    ),
    (
        sidecar(securityContext=SAFE, envFrom=[{"secretRef": {"name": "theirs"}}]),
        "containers[x].envFrom[0].secretRef",
    ),
    *(
        (
            {
                containers: [
                    {
                        "name": "y",
                        "securityContext": SAFE,
                        "env": env(secretKeyRef={"name": "theirs", "key": "k"}),
                    }
                ]
            },
            f"{containers}[y].env[A].valueFrom.secretKeyRef",
        )
        for containers in ("initContainers", "ephemeralContainers")
    ),
]


@pytest.mark.parametrize(("spec", "path"), ATTACKS, ids=str)
def test_attacks_are_refused_with_the_field_and_the_setting(spec: Object, path: str) -> None:
    gateway_keys = {"apiKeys": {"secretName": "clients"}}
    with pytest.raises(ValueError, match=SETTING) as refused:
        pod_of("decode", {"spec": spec}, Restrictions(), gateway=gateway_keys)
    assert str(refused.value).startswith(f"decode.template.spec.{path}")
    pod_of("decode", {"spec": spec}, None)  # unrestricted


@pytest.mark.parametrize("role", ["prefill", "decode", "gateway"])
def test_the_templates_of_all_roles_are_checked(role: str) -> None:
    with pytest.raises(ValueError, match=rf"^{role}\.template\.spec\.hostNetwork must be"):
        pod_of(role, {"spec": {"hostNetwork": True}}, Restrictions())


@pytest.mark.parametrize(
    "name",
    [
        "container.apparmor.security.beta.kubernetes.io/engine",
        "container.seccomp.security.alpha.kubernetes.io/engine",
        "seccomp.security.alpha.kubernetes.io/pod",
    ],
)
def test_annotations_of_kernel_profiles_are_refused_even_with_an_allowed_prefix(name: str) -> None:
    allowed = Restrictions(annotation_prefixes=("container.", "seccomp."))
    pod_of("decode", {"metadata": {"annotations": {name: "runtime/default"}}}, allowed)
    with pytest.raises(ValueError, match=rf"annotations.{name} must be runtime/default"):
        pod_of("decode", {"metadata": {"annotations": {name: "unconfined"}}}, allowed)


@pytest.mark.parametrize("kind", ["annotations", "labels"])
def test_annotations_and_labels_of_claims_need_an_allowed_prefix(kind: str) -> None:
    claim = {"metadata": {kind: {"a.example/b": "c"}}, "spec": {}}
    template = {"spec": volume(ephemeral={"volumeClaimTemplate": claim})}
    with pytest.raises(ValueError, match=rf"volumeClaimTemplate.metadata.{kind}.a.example/b: "):
        pod_of("decode", template, Restrictions())
    pod_of("decode", template, Restrictions(annotation_prefixes=("a.example/",)))


@pytest.mark.parametrize("name", ["azure.workload.identity/use", "sidecar.istio.io/inject"])
def test_labels_that_webhooks_execute_need_an_allowed_prefix(name: str) -> None:
    template = {"metadata": {"labels": {name: "true"}}}
    path = rf"^decode\.template\.metadata\.labels\.{name}: the operator's setting annotationPref"
    with pytest.raises(ValueError, match=path):
        pod_of("decode", template, Restrictions())
    pod_of("decode", template, Restrictions(annotation_prefixes=(name.partition("/")[0],)))
    pod_of("decode", {"metadata": {"labels": {"team": "a"}}}, Restrictions())


def test_a_model_in_a_folder_of_the_node_can_only_be_mounted_to_read_only() -> None:
    allowed = Restrictions(host_paths=("/mnt/models/",))
    model = {"uri": "file:///mnt/models/x"}
    mount = {"name": "model", "mountPath": "/mnt/models/x"}
    for template in (
        {"spec": engine(volumeMounts=[{**mount, "readOnly": False}])},
        {"spec": engine(volumeMounts=[{**mount, "readOnly": None}])},
        {"spec": engine(volumeMounts=[{**mount, "mountPath": "/again"}])},
        {"spec": sidecar(securityContext=SAFE, volumeMounts=[mount])},
        {
            "spec": {
                "initContainers": [{"name": "i", "securityContext": SAFE, "volumeMounts": [mount]}]
            }
        },
    ):
        with pytest.raises(ValueError, match=r"volumeMounts\[.*\]\.readOnly must be true"):
            pod_of("decode", template, allowed, model=model)
    again = engine(volumeMounts=[{**mount, "mountPath": "/again", "readOnly": True}])
    pod_of("decode", {"spec": again}, allowed, model=model)


def test_templates_within_the_profile_are_accepted() -> None:
    named = {"apiKeys": {"secretName": "clients"}, "tls": {"secretName": "certificate"}}
    spec = {
        "nodeSelector": {"secret": "pool"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
        "priorityClassName": "high",
        "imagePullSecrets": [{"name": "registry"}],
        "terminationGracePeriodSeconds": 5,
        "securityContext": {"runAsUser": 1000, "sysctls": [{"name": SYSCTLS.copy().pop()}]},
        "volumes": [
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
            {"name": "secret-store", "persistentVolumeClaim": {"claimName": "c"}},
            {"name": "clients", "secret": {"secretName": "clients"}},
            {
                "name": "all",
                "projected": {
                    "sources": [
                        {"secret": {"name": "certificate"}},
                        {"configMap": {"name": "c"}},
                        {"downwardAPI": {"items": []}},
                    ]
                },
            },
        ],
        "containers": [
            {
                "name": "engine",
                "env": [{"name": "CLIENT_SECRET", "value": "x"}],
                "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
                "securityContext": {"capabilities": {"add": ["NET_BIND_SERVICE"]}},
            },
            {"name": "x", "image": "i", "securityContext": SAFE},
        ],
    }
    pod = pod_of("decode", {"spec": spec}, Restrictions(), gateway=named)
    assert violations(pod["metadata"], pod["spec"]) == []
    assert pod == pod_of("decode", {"spec": spec}, None, gateway=named)


#: Values of any field. Most are of a type that the API server refuses.
EXAMPLES: list[Any] = [
    *(None, True, False, 0, 1, 7, "", "x", [], {}, "ALL", ["ALL"], ["SYS_ADMIN"], "Unconfined"),
    *("container_t", "spc_t", "RuntimeDefault", "Localhost", "Default", "Unmasked"),
]
VALUES = st.sampled_from(EXAMPLES)
SHARED_FIELDS = [
    *("runAsUser", "runAsNonRoot", "seccompProfile.type", "windowsOptions.hostProcess"),
    *("seLinuxOptions.type", "seLinuxOptions.user", "seLinuxOptions.role", "appArmorProfile.type"),
]
#: The controls of the profile, by their fields in a pod's spec and in a container.
POD_FIELDS = [
    *("hostNetwork", "hostPID", "hostIPC"),
    *(f"securityContext.{field}" for field in SHARED_FIELDS),
]
CONTAINER_FIELDS = [
    *(f"securityContext.{field}" for field in SHARED_FIELDS),
    *(
        f"securityContext.{field}"
        for field in (
            *("privileged", "allowPrivilegeEscalation", "procMount"),
            *("capabilities.add", "capabilities.drop"),
        )
    ),
    *(
        f"{handler}.{action}.host"
        for handler in (
            *("livenessProbe", "readinessProbe", "startupProbe"),
            *("lifecycle.postStart", "lifecycle.preStop"),
        )
        for action in ("httpGet", "tcpSocket")
    ),
]


def nested(path: str, value: Any) -> Object:
    for step in reversed(path.split(".")):
        value = {step: value}
    return dict(value)


@pytest.mark.parametrize(
    ("containers", "field"),
    [
        *(("", field) for field in POD_FIELDS),
        *(
            (containers, field)
            for containers in ("containers", "initContainers", "ephemeralContainers")
            for field in CONTAINER_FIELDS
        ),
    ],
)
def test_values_that_the_profile_refuses_are_refused_in_every_field(
    containers: str, field: str
) -> None:
    num_refused = 0
    for value in EXAMPLES:
        spec = nested(field, value)
        try:
            if containers:
                spec = {containers: [merge({"name": "x", "securityContext": SAFE}, spec, "")]}
            pod = pod_of("decode", {"spec": spec}, Restrictions())
        except ValueError:
            num_refused += 1
        else:
            assert violations(pod["metadata"], pod["spec"]) == [], value
    assert 0 < num_refused < len(EXAMPLES)


def shaped(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Draw mostly objects with some of these fields."""
    return st.one_of(*[st.fixed_dictionaries({}, optional=fields)] * 4, VALUES)


def a_type(*types: str) -> st.SearchStrategy[Any]:
    return shaped(type=st.sampled_from([*types, "RuntimeDefault", "Localhost", "", None]))


SECURITY = {
    "runAsUser": VALUES,
    "runAsNonRoot": VALUES,
    "seccompProfile": a_type("Unconfined"),
    "appArmorProfile": a_type("Unconfined"),
    "seLinuxOptions": shaped(type=st.sampled_from(["spc_t", "container_t"]), user=VALUES),
    "windowsOptions": shaped(hostProcess=VALUES),
}
HANDLER = shaped(httpGet=shaped(host=VALUES), tcpSocket=shaped(host=VALUES))
CONTAINER = shaped(
    name=st.sampled_from(["engine", "model", "other"]),
    securityContext=st.one_of(
        st.just(SAFE),
        shaped(
            **SECURITY,
            privileged=VALUES,
            allowPrivilegeEscalation=VALUES,
            procMount=VALUES,
            capabilities=shaped(add=VALUES, drop=VALUES),
        ),
    ),
    ports=st.lists(shaped(name=st.just("http"), hostPort=VALUES), max_size=1) | VALUES,
    livenessProbe=HANDLER,
    lifecycle=shaped(preStop=HANDLER),
)
CONTAINERS = st.lists(CONTAINER, max_size=2)
SOURCES: dict[str, st.SearchStrategy[Any]] = {
    kind: st.just({}) for kind in ("hostPath", "nfs", "emptyDir", "configMap", "csi")
}
SPECS = shaped(
    hostNetwork=VALUES,
    hostPID=VALUES,
    hostIPC=VALUES,
    securityContext=shaped(
        **SECURITY,
        sysctls=st.lists(
            shaped(name=st.sampled_from(["kernel.msgmax", "net.ipv4.tcp_syncookies"])), max_size=2
        ),
    ),
    volumes=st.lists(shaped(name=st.sampled_from(["v", "tmp", "model"]), **SOURCES), max_size=2),
    containers=CONTAINERS,
    initContainers=CONTAINERS,
    ephemeralContainers=CONTAINERS,
)


@settings(max_examples=1500, deadline=None)
@given(SPECS, st.sampled_from(["prefill", "decode", "gateway"]))
@example({"securityContext": {"runAsNonRoot": 1}}, "decode")
def test_a_template_that_is_accepted_makes_pods_that_the_profile_admits(
    spec: Any, role: str
) -> None:
    try:
        pod = pod_of(role, {"spec": spec}, Restrictions())
    except ValueError as error:
        found = [] if str(error).startswith(f"{role}.template.spec") else [str(error)]
    else:
        found = violations(pod["metadata"], pod["spec"])
    assert found == []
