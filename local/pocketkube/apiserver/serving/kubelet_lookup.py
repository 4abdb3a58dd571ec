"""Find kubelets: they serve logs, exec, attach, port-forward and the usage of pods."""

from __future__ import annotations

from dataclasses import dataclass

import aiohttp

from pocketkube.apiserver import errors
from pocketkube.apiserver.errors import ApiError
from pocketkube.apiserver.objects.object_registry import Registry
from pocketkube.apiserver.resources import Object, RequestInfo

#: Maximum time to connect to a kubelet.
CONNECT_S = 5.0


@dataclass(frozen=True)
class KubeletLocation:
    """The base URL of the kubelet that runs a pod, and the name of the pod's node."""

    url: str
    node: str

    def unreachable(self, error: aiohttp.ClientError) -> ApiError:
        """Build the error for a kubelet that does not answer."""
        return ApiError(502, "BadGateway", f"cannot reach the kubelet of node {self.node}: {error}")


def locate(pod: Object, registry: Registry) -> KubeletLocation:
    """Find the kubelet that runs `pod`.

    Raises:
        ApiError: 400, the pod is bound to no node; 404, the Node object does not exist; 502, the
            Node object has no address or port.
    """
    node_name = pod["spec"].get("nodeName")
    if not node_name:
        raise errors.bad_request(f"pod {pod['metadata']['name']} does not have a host assigned")
    nodes = registry.catalog.builtin("nodes")
    return KubeletLocation(kubelet_url(registry.get(RequestInfo(nodes, name=node_name))), node_name)


def kubelet_url(node: Object) -> str:
    """Return the base URL of a node's kubelet.

    Raises:
        ApiError: 502, the Node object has no address or port.
    """
    status = node.get("status") or {}
    address = next(
        (a["address"] for a in status.get("addresses") or () if a["type"] == "InternalIP"), None
    )
    port = ((status.get("daemonEndpoints") or {}).get("kubeletEndpoint") or {}).get("Port")
    if not address or not port:
        name = node["metadata"]["name"]
        raise ApiError(
            502,
            "BadGateway",
            f"node {name} reports no InternalIP or kubelet port; is its kubelet running?",
        )
    return f"https://{address}:{port}"


def container_of(pod: Object, asked: str) -> str:
    """Return the name of the container that a request is about.

    Args:
        asked: the container's name in the request; empty for the only container of the pod.

    Raises:
        ApiError: 400, the pod has no container `asked`, or `asked` is empty and the pod has several
            containers.
    """
    name = pod["metadata"]["name"]
    spec = pod["spec"]
    names = [c["name"] for group in ("initContainers", "containers") for c in spec.get(group) or ()]
    if asked:
        if asked not in names:
            raise errors.bad_request(f"container {asked} is not valid for pod {name}")
        return asked
    main = [container["name"] for container in spec["containers"]]
    if len(main) > 1:
        raise errors.bad_request(
            f"a container name must be specified for pod {name}, choose one of: [{' '.join(main)}]"
        )
    return str(main[0])
