"""The table of built-in kinds.

Discovery, OpenAPI, routing and the README use this table. Custom resources are in the catalog
instead (schema/catalog.py). `python -m pocketkube.apiserver.resources` prints the table as
Markdown.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Object = dict[str, Any]

#: Verbs of a kind that is stored.
VERBS = ("create", "delete", "deletecollection", "get", "list", "patch", "update", "watch")
READ_UPDATE = ("get", "patch", "update")

#: Storage key of custom resource definitions.
DEFINITIONS = "customresourcedefinitions.apiextensions.k8s.io"


def lookup(obj: Object, path: str) -> Any:
    """Return the field of `obj` at a path such as `.spec.replicas`; None if missing."""
    value: Any = obj
    for name in path.strip(".").split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


@dataclass(frozen=True)
class Subresource:
    """A subresource such as `status`. An empty `kind` means the kind of the object itself."""

    name: str
    verbs: tuple[str, ...]
    kind: str = ""
    group: str = ""
    version: str = ""


STATUS = Subresource("status", READ_UPDATE)
SCALE = Subresource("scale", READ_UPDATE, "Scale", "autoscaling", "v1")


@dataclass(frozen=True)
class Resource:
    """A kind that the API server serves, in one API version."""

    group: str
    version: str
    kind: str
    plural: str
    namespaced: bool = True
    short_names: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    subresources: tuple[Subresource, ...] = ()
    singular: str = ""
    list_kind: str = ""
    #: Storage key, by default `qualified`. Kinds with the same key are views of the same objects.
    storage: str = ""
    #: Whether a custom resource definition declares the kind.
    custom: bool = False
    verbs: tuple[str, ...] = VERBS
    #: Remark in the table of README.md.
    note: str = ""

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def qualified(self) -> str:
        """The plural name with the API group, as in error messages: `pods`, `deployments.apps`."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    @property
    def storage_key(self) -> str:
        return self.storage or self.qualified

    @property
    def singular_name(self) -> str:
        return self.singular or self.kind.lower()

    @property
    def list_kind_name(self) -> str:
        return self.list_kind or f"{self.kind}List"

    @property
    def has_status(self) -> bool:
        return self.subresource("status") is not None

    def subresource(self, name: str) -> Subresource | None:
        return next((sub for sub in self.subresources if sub.name == name), None)


@dataclass(frozen=True)
class RequestInfo:
    """The target of a request: a collection, an object or a subresource.

    The verb is not included, unlike in the `RequestInfo` of kube-apiserver.
    """

    resource: Resource
    #: Empty for cluster scope and for all namespaces.
    namespace: str = ""
    #: Empty for a collection.
    name: str = ""
    #: For example `status`; empty for the object itself.
    subresource: str = ""


_RBAC = "rbac.authorization.k8s.io"
_UNENFORCED = "stored, not enforced: every valid token may do everything"

_METRICS = "metrics.k8s.io"
_MEASURED = "get and list only; the kubelet measures for one second"
# Not stored: kubelets measure the usage of their node and its pods.
NODE_METRICS = Resource(
    _METRICS,
    "v1beta1",
    "NodeMetrics",
    "nodes",
    namespaced=False,
    verbs=("get", "list"),
    note=_MEASURED,
)
POD_METRICS = Resource(
    _METRICS, "v1beta1", "PodMetrics", "pods", verbs=("get", "list"), note=_MEASURED
)

BUILTIN: tuple[Resource, ...] = (
    Resource(
        "",
        "v1",
        "Namespace",
        "namespaces",
        namespaced=False,
        short_names=("ns",),
        subresources=(STATUS,),
    ),
    Resource(
        "",
        "v1",
        "Pod",
        "pods",
        short_names=("po",),
        categories=("all",),
        subresources=(
            STATUS,
            Subresource("log", ("get",)),
            Subresource("exec", ("create", "get"), "PodExecOptions"),
            Subresource("attach", ("create", "get"), "PodAttachOptions"),
            Subresource("portforward", ("create", "get"), "PodPortForwardOptions"),
            Subresource("binding", ("create",), "Binding", "", "v1"),
        ),
        note="no eviction; the pod's kubelet serves log, exec, attach and portforward",
    ),
    Resource(
        "",
        "v1",
        "Service",
        "services",
        short_names=("svc",),
        categories=("all",),
        subresources=(STATUS,),
        note="type ClusterIP (or headless) only",
    ),
    Resource("", "v1", "ConfigMap", "configmaps", short_names=("cm",)),
    Resource("", "v1", "Secret", "secrets"),
    Resource(
        "",
        "v1",
        "ServiceAccount",
        "serviceaccounts",
        short_names=("sa",),
        subresources=(
            Subresource("token", ("create",), "TokenRequest", "authentication.k8s.io", "v1"),
        ),
    ),
    Resource(
        "", "v1", "Event", "events", short_names=("ev",), storage="events", note="kept for one hour"
    ),
    Resource(
        "", "v1", "Node", "nodes", namespaced=False, short_names=("no",), subresources=(STATUS,)
    ),
    Resource("events.k8s.io", "v1", "Event", "events", short_names=("ev",), storage="events"),
    Resource(
        "apps",
        "v1",
        "Deployment",
        "deployments",
        short_names=("deploy",),
        categories=("all",),
        subresources=(STATUS, SCALE),
    ),
    Resource(
        "apps",
        "v1",
        "ReplicaSet",
        "replicasets",
        short_names=("rs",),
        categories=("all",),
        subresources=(STATUS, SCALE),
    ),
    Resource("apps", "v1", "ControllerRevision", "controllerrevisions"),
    Resource(
        "networking.k8s.io",
        "v1",
        "Ingress",
        "ingresses",
        short_names=("ing",),
        subresources=(STATUS,),
    ),
    Resource(
        "networking.k8s.io",
        "v1",
        "NetworkPolicy",
        "networkpolicies",
        short_names=("netpol",),
        note="stored, not enforced",
    ),
    Resource(
        "policy",
        "v1",
        "PodDisruptionBudget",
        "poddisruptionbudgets",
        short_names=("pdb",),
        subresources=(STATUS,),
        note="stored, not enforced: there is no eviction",
    ),
    Resource("coordination.k8s.io", "v1", "Lease", "leases"),
    Resource(
        "apiextensions.k8s.io",
        "v1",
        "CustomResourceDefinition",
        "customresourcedefinitions",
        namespaced=False,
        short_names=("crd", "crds"),
        categories=("api-extensions",),
        subresources=(STATUS,),
        note="no conversion webhooks",
    ),
    Resource(_RBAC, "v1", "Role", "roles", note=_UNENFORCED),
    Resource(_RBAC, "v1", "RoleBinding", "rolebindings", note=_UNENFORCED),
    Resource(_RBAC, "v1", "ClusterRole", "clusterroles", namespaced=False, note=_UNENFORCED),
    Resource(
        _RBAC, "v1", "ClusterRoleBinding", "clusterrolebindings", namespaced=False, note=_UNENFORCED
    ),
    NODE_METRICS,
    POD_METRICS,
)


def markdown_table() -> str:
    """Format the table of built-in kinds as Markdown."""
    lines = [
        "| group/version | kind | subresources | remarks |",
        "| --- | --- | --- | --- |",
    ]
    for resource in BUILTIN:
        subs = ", ".join(sub.name for sub in resource.subresources)
        lines.append(f"| `{resource.api_version}` | {resource.kind} | {subs} | {resource.note} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(markdown_table())
