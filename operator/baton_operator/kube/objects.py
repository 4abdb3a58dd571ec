"""Read and write Kubernetes objects by kind.

The kinds and their API paths are a fixed table. Only the APIs that not every cluster serves are
discovered.
"""

from __future__ import annotations

from collections import OrderedDict
from contextvars import ContextVar
from typing import Any
from urllib.parse import quote

from baton_kube.client import ByteBudget, KubeClient, KubeError, Object
from baton_operator import names

_RESOURCES = {
    "LLMService": (names.API_VERSION, names.PLURAL),
    "ConfigMap": ("v1", "configmaps"),
    "Secret": ("v1", "secrets"),
    "Event": ("v1", "events"),
    "Pod": ("v1", "pods"),
    "Service": ("v1", "services"),
    "ServiceAccount": ("v1", "serviceaccounts"),
    "Deployment": ("apps/v1", "deployments"),
    "ControllerRevision": ("apps/v1", "controllerrevisions"),
    "Ingress": ("networking.k8s.io/v1", "ingresses"),
    "NetworkPolicy": ("networking.k8s.io/v1", "networkpolicies"),
    "Lease": ("coordination.k8s.io/v1", "leases"),
    "Role": ("rbac.authorization.k8s.io/v1", "roles"),
    "RoleBinding": ("rbac.authorization.k8s.io/v1", "rolebindings"),
    "PodDisruptionBudget": ("policy/v1", "poddisruptionbudgets"),
    "HTTPRoute": ("gateway.networking.k8s.io/v1", "httproutes"),
}
PLURALS = frozenset(plural for _, plural in _RESOURCES.values())
#: Objects in one page of a list of LLMServices. Each may have 1.5 MiB, and decoded it takes up to
#: 48 times as much memory.
PAGE_SIZE = 2
#: Limit on the JSON of one object that is read.
MAX_OBJECT_BYTES = 2**19
#: Limit on all bytes that the current reconcile reads. None outside of reconciles.
reads: ContextVar[ByteBudget | None] = ContextVar("reads", default=None)
MAX_OWN_WRITES = 4096  # number of own writes that `Kube.is_own_write` remembers


class Kube:
    """Reads and writes objects by kind.

    Methods that send a request raise KubeError if the API server refuses the request, and OSError
    if no response arrives.
    """

    def __init__(self, client: KubeClient) -> None:
        self.client = client
        #: apiVersion of PodDisruptionBudgets; None if the server has none. Set by `discover`.
        self.policy_api: str | None = None
        #: Whether the server has HTTPRoutes of the Gateway API. Set by `discover` and
        #: `discover_http_routes`.
        self.http_routes = False
        self._own_writes: OrderedDict[str, None] = OrderedDict()

    async def discover(self) -> bool:
        """Discover the optional APIs of the server. Return whether the LLMService CRD is installed.

        The results are stored in `policy_api` and `http_routes`.
        """
        served = [
            version
            for version in ("policy/v1", "policy/v1beta1")
            if await self._serves(version, "poddisruptionbudgets")
        ]
        self.policy_api = served[0] if served else None
        self.http_routes = await self._serves(*self.resource("HTTPRoute"))
        return await self._serves(*self.resource(names.KIND))

    async def discover_http_routes(self) -> bool:
        """Return whether the server has HTTPRoutes.

        Each call repeats the discovery until HTTPRoutes are found. The result is stored in
        `http_routes`.
        """
        self.http_routes = self.http_routes or await self._serves(*self.resource("HTTPRoute"))
        return self.http_routes

    async def _serves(self, api_version: str, plural: str) -> bool:
        found = await self._find(f"/apis/{api_version}")
        return found is not None and any(
            resource["name"] == plural for resource in found["resources"]
        )

    async def _find(self, path: str, **options: Any) -> Object | None:
        """Return the object at `path`; None if it does not exist.

        `options` are passed to `KubeClient.get`.
        """
        try:
            budget = ByteBudget(MAX_OBJECT_BYTES, reads.get())
            return await self.client.get(path, budget=budget, **options)
        except KubeError as error:
            if error.status == 404:
                return None
            raise

    def path(
        self,
        kind: str,
        namespace: str | None,
        name: str | None = None,
        subresource: str | None = None,
    ) -> str:
        """Return the API path of an object, such as `/apis/apps/v1/namespaces/x/deployments/y`.

        Without `name` the result is the path of a collection. Without `namespace` the collection
        covers all namespaces.
        """
        version, plural = self.resource(kind)
        parts = [
            "apis" if "/" in version else "api",
            version,
            namespace and f"namespaces/{namespace}",
            plural,
        ]
        return "/" + "/".join(
            part for part in (*parts, quote(name or "", safe=""), subresource) if part
        )

    def resource(self, kind: str) -> tuple[str, str]:
        """Return (apiVersion, plural name) of `kind`.

        Raises:
            KeyError: `kind` is not in _RESOURCES.
        """
        version, plural = _RESOURCES[kind]
        return (self.policy_api or version) if kind == "PodDisruptionBudget" else version, plural

    async def read(
        self, kind: str, namespace: str, name: str, not_older_than: str | None = None
    ) -> Object | None:
        """Return one object; None if it does not exist.

        Args:
            not_older_than: a resource version that the API server's watch cache must have reached.
                The reply may then come from that cache. None: a consistent read.
        """
        query = () if not_older_than is None else (("resourceVersion", not_older_than),)
        return await self._find(self.path(kind, namespace, name), query=query)

    async def exists(self, kind: str, namespace: str, name: str) -> bool:
        """Return whether the object exists. Only the metadata of the object is requested."""
        return await self._find(self.path(kind, namespace, name), metadata_only=True) is not None

    async def list_all(
        self,
        kind: str,
        namespace: str | None,
        selector: dict[str, str] | None = None,
        not_older_than: str | None = None,
    ) -> list[Object]:
        """Return the objects of `kind` that have the labels in `selector`.

        Args:
            namespace: namespace of the objects. None: all namespaces.
            not_older_than: as in `read`.
        """
        path, selected = self.path(kind, namespace), names.serialized(selector or {})
        listed, _ = await self.client.list(
            path,
            label_selector=selected,
            not_older_than=not_older_than,
            budget=reads.get(),
        )
        api_version, _ = self.resource(kind)
        # The items of a list have neither apiVersion nor kind.
        return [{"apiVersion": api_version, "kind": kind, **obj} for obj in listed]

    async def create(self, obj: Object) -> Object:
        """Create `obj`, and return the stored object.

        Raises:
            KubeError: the request was refused; status 409 if the name is taken.
        """
        path = self.path(obj["kind"], obj["metadata"]["namespace"])
        return self._record_write(await self.client.create(path, obj, field_manager=names.MANAGER))

    async def apply(self, obj: Object) -> Object:
        """Apply `obj` with server-side apply, as field manager `baton-operator`.

        The operator becomes the owner of all fields in `obj`, because `KubeClient.apply` sets
        `force`. Return the stored object.
        """
        return self._record_write(
            await self.client.apply(self._path_of(obj), obj, field_manager=names.MANAGER)
        )

    async def merge(
        self, kind: str, namespace: str, name: str, patch: Object, subresource: str | None = None
    ) -> Object:
        """Apply a JSON merge patch to one object, and return the stored object."""
        path = self.path(kind, namespace, name, subresource)
        return self._record_write(await self.client.merge(path, patch, field_manager=names.MANAGER))

    async def replace(self, obj: Object) -> Object:
        """Replace the whole stored object with `obj`, and return the new stored object.

        Raises:
            KubeError: the request was refused; status 409 if the resourceVersion of `obj` is not
                the current one.
        """
        return self._record_write(await self.client.replace(self._path_of(obj), obj))

    async def delete(self, kind: str, namespace: str, name: str, uid: str) -> bool:
        """Delete the object with this uid. Return False if no object has this name and uid."""
        try:
            self._record_write(await self.client.delete(self.path(kind, namespace, name), uid=uid))
        except KubeError as error:
            if error.status in (404, 409):
                return False
            raise
        return True

    def is_own_write(self, version: str) -> bool:
        """Return whether a recent write of this operator produced resource version `version`."""
        return version in self._own_writes

    def _path_of(self, obj: Object) -> str:
        return self.path(obj["kind"], obj["metadata"]["namespace"], obj["metadata"]["name"])

    def _record_write(self, obj: Object) -> Object:
        if version := (obj.get("metadata") or {}).get("resourceVersion"):
            self._own_writes[version] = None
            if len(self._own_writes) > MAX_OWN_WRITES:
                self._own_writes.popitem(last=False)
        return obj


def resource_of(path: str) -> str:
    """Return the resource in an API path, such as `pods` or `llmservices/status`.

    Empty if the path contains none of the operator's resources.
    """
    parts = path.split("/")
    after = parts.index("namespaces") + 2 if "namespaces" in parts else 0
    at = next((at for at, part in enumerate(parts) if at >= after and part in PLURALS), None)
    return "" if at is None else "/".join([parts[at], *parts[at + 2 :]])
