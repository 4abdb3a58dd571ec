"""Find the endpoints of a Service's port, and the Service for an HTTP request. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from baton_kube.client import Object
from pocketkube.conditions import has_condition
from pocketkube.ports import container_port

#: (address, port) of a pod.
Endpoint = tuple[str, int]


@dataclass(frozen=True)
class Backend:
    """The Service and port that an Ingress rule names. The port is a number or a name."""

    namespace: str
    service: str
    port: int | str


@dataclass(frozen=True)
class Route:
    """One path of one rule of an Ingress."""

    #: Host to match. Empty matches every host. May begin with "*.".
    host: str
    path: str
    exact: bool
    backend: Backend


def endpoints(service: Object, port: Object, pods: Iterable[Object]) -> list[Endpoint]:
    """Return the sorted (address, port) pairs of the pods that receive the Service's traffic.

    Args:
        port: an entry of the Service's `spec.ports`.
        pods: the candidate pods, which may be of any namespace.
    """
    selector = service["spec"].get("selector")
    if not selector:
        return []
    unready_too = bool(service["spec"].get("publishNotReadyAddresses"))
    found = []
    for pod in pods:
        metadata, status = pod["metadata"], pod.get("status") or {}
        labels = metadata.get("labels") or {}
        if (
            metadata["namespace"] != service["metadata"]["namespace"]
            or selector.items() - labels.items()
        ):
            continue
        if not status.get("podIP") or metadata.get("deletionTimestamp"):
            continue
        number = container_port(port.get("targetPort") or port["port"], pod["spec"]["containers"])
        if (unready_too or has_condition(pod, "Ready")) and number is not None:
            found.append((str(status["podIP"]), number))
    return sorted(found)


def find_port(service: Object, port: int | str) -> Object | None:
    """Return the Service's entry of `spec.ports` with this number or name; None if none matches."""
    ports = service["spec"].get("ports") or []
    return next((each for each in ports if port in (each["port"], each.get("name"))), None)


def routes(ingresses: Iterable[Object]) -> list[Route]:
    """Return the routes of all Ingresses, the most specific first."""
    result = []
    for ingress in ingresses:
        spec, namespace = ingress["spec"], ingress["metadata"]["namespace"]
        if default := spec.get("defaultBackend"):
            result.append(Route("", "/", False, _backend(namespace, default)))
        for rule in spec.get("rules") or []:
            for path in (rule.get("http") or {}).get("paths") or []:
                exact = path.get("pathType") == "Exact"
                backend = _backend(namespace, path["backend"])
                result.append(
                    Route((rule.get("host") or "").lower(), path.get("path") or "/", exact, backend)
                )
    # Exact hosts, wildcards, no host; then exact paths; then the longest path.
    result.sort(
        key=lambda route: (_host_rank(route.host), route.exact, len(route.path)), reverse=True
    )
    return result


def match_route(table: Iterable[Route], host: str, path: str) -> Backend | None:
    """Return the backend for a request's host and path; None if no route matches.

    Args:
        host: the Host header without its port.
    """
    host = host.lower()
    return next(
        (
            route.backend
            for route in table
            if _host_matches(route.host, host) and _path_matches(route, path)
        ),
        None,
    )


def _backend(namespace: str, backend: Object) -> Backend:
    service = backend["service"]
    port = service.get("port") or {}
    return Backend(namespace, service["name"], port.get("number") or port.get("name") or "")


def _host_rank(host: str) -> int:
    if not host:
        return 0
    return 1 if host.startswith("*.") else 2


def _host_matches(rule: str, host: str) -> bool:
    if rule.startswith("*."):
        return host.partition(".")[2] == rule[2:]  # a wildcard stands for one label
    return not rule or rule == host


def _path_matches(route: Route, path: str) -> bool:
    if route.exact:
        return path == route.path
    prefix = route.path.rstrip("/")
    return path == prefix or path.startswith(prefix + "/")
