"""Compute the environment variables, command line and downward API fields of a container.

The sources are the pod, and the ConfigMaps and Secrets that the pod names.
"""

from __future__ import annotations

import base64
import os
import re
import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from baton_kube.client import Object

#: Returns the object of (kind, namespace, name); None if it does not exist. Raises ConfigError if
#: the API server does not answer or refuses the request.
Lookup = Callable[[str, str, str], Awaitable[Object | None]]

#: Environment variables of the kubelet that containers inherit: paths of libraries, caches etc.
INHERITED = (
    "CUDA_HOME",
    "CUDA_VISIBLE_DEVICES",
    "HF_HOME",
    "HOME",
    "LANG",
    "LC_ALL",
    "LD_LIBRARY_PATH",
    "OMP_NUM_THREADS",
    "TMPDIR",
    "TRITON_CACHE_DIR",
    "TZ",
    "USER",
)

_REFERENCE = re.compile(r"\$(\$|\([^()\s]*\))")
_SUBSCRIPT = re.compile(r"^metadata\.(labels|annotations)\['(.+)'\]$")


class ConfigError(Exception):
    """A container's configuration is invalid (waiting reason CreateContainerConfigError)."""


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Replace `$(NAME)` in `text` by the variable's value, and `$$` by `$`.

    If there is no variable NAME, `$(NAME)` stays as it is.
    """

    def replace(match: re.Match[str]) -> str:
        body = match.group(1)
        return "$" if body == "$" else variables.get(body[1:-1], match.group(0))

    return _REFERENCE.sub(replace, text)


def command_line(container: Object, variables: Mapping[str, str]) -> list[str]:
    """Return the container's command and arguments, with `$(NAME)` replaced.

    Raises:
        ConfigError: the container has no command. The entrypoint of its image is not used.
    """
    if not container.get("command"):
        raise ConfigError(
            f"container {container['name']!r} has no command; images are ignored here, so "
            "spec.containers[].command must be set"
        )
    return [
        expand(word, variables) for word in [*container["command"], *(container.get("args") or [])]
    ]


def base_environment(pod: Object, *, pod_ip: str, server: str) -> dict[str, str]:
    """Return the environment variables that every container of the pod gets.

    Args:
        server: URL of the API server.
    """
    url = urlsplit(server)
    inherited = {name: os.environ[name] for name in INHERITED if name in os.environ}
    return {
        **inherited,
        "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}",
        "HOSTNAME": pod["metadata"]["name"],
        "KUBERNETES_SERVICE_HOST": url.hostname or "127.0.0.1",
        "KUBERNETES_SERVICE_PORT": str(url.port or 443),
        "POD_IP": pod_ip,
    }


async def container_environment(
    pod: Object,
    container: Object,
    base: Mapping[str, str],
    addresses: Mapping[str, str],
    lookup: Lookup,
) -> dict[str, str]:
    """Return `base` with the variables of the container's `envFrom` and `env` added.

    A variable of `env` replaces an earlier variable of the same name. The value of a variable in
    `env` can refer to earlier variables.

    Args:
        addresses: values of `status.podIP` and `status.hostIP`. The pod object may still lack them.

    Raises:
        ConfigError: a required ConfigMap, Secret or key is missing, or a field is not supported.
    """
    namespace = pod["metadata"]["namespace"]
    result = dict(base)
    for source in container.get("envFrom") or []:
        prefix = source.get("prefix") or ""
        for kind, field in (("ConfigMap", "configMapRef"), ("Secret", "secretRef")):
            if reference := source.get(field):
                data = await read_data(kind, namespace, reference["name"], reference, lookup)
                result |= {f"{prefix}{key}": _text(value) for key, value in data.items()}
    for variable in container.get("env") or []:
        if source := variable.get("valueFrom"):
            value = await _value_from(source, pod, addresses, lookup)
            if value is None:
                continue
        else:
            value = expand(variable.get("value") or "", result)
        result[variable["name"]] = value
    return result


def field_value(path: str, pod: Object, addresses: Mapping[str, str]) -> str:
    """Return the value of the downward API field `path`.

    `metadata.labels` and `metadata.annotations` are returned as lines of `key="value"`.

    Raises:
        ConfigError: the field is not supported.
    """
    metadata, spec = pod["metadata"], pod["spec"]
    if match := _SUBSCRIPT.match(path):
        return str((metadata.get(match.group(1)) or {}).get(match.group(2), ""))
    match path:
        case "metadata.labels" | "metadata.annotations":
            items = sorted((metadata.get(path.removeprefix("metadata.")) or {}).items())
            return "\n".join(f'{key}="{_escape(value)}"' for key, value in items)
        case "metadata.name" | "metadata.namespace" | "metadata.uid":
            return str(metadata[path.removeprefix("metadata.")])
        case "spec.nodeName":
            return str(spec.get("nodeName", ""))
        case "spec.serviceAccountName":
            return str(spec.get("serviceAccountName") or "default")
        case "status.podIP" | "status.podIPs":
            return addresses["status.podIP"]
        case "status.hostIP" | "status.hostIPs":
            return addresses["status.hostIP"]
    raise ConfigError(f"fieldPath {path!r} is not supported here")


async def read_data(
    kind: str, namespace: str, name: str, reference: Object, lookup: Lookup
) -> dict[str, bytes]:
    """Return the data of a ConfigMap or Secret: key -> content.

    Args:
        reference: the field that refers to the object. With `optional: true`, the result for a
            missing object is empty.

    Raises:
        ConfigError: the object is missing and not optional, or cannot be read.
    """
    obj = await lookup(kind, namespace, name)
    if obj is None:
        if reference.get("optional"):
            return {}
        raise ConfigError(f'{kind.lower()} "{name}" not found')
    plain, encoded = obj.get("data") or {}, obj.get("binaryData") or {}
    if kind == "Secret":
        plain, encoded = {}, plain
    return {key: value.encode() for key, value in plain.items()} | {
        key: base64.b64decode(value) for key, value in encoded.items()
    }


async def _value_from(
    source: Object,
    pod: Object,
    addresses: Mapping[str, str],
    lookup: Lookup,
) -> str | None:
    if reference := source.get("fieldRef"):
        return field_value(reference["fieldPath"], pod, addresses)
    for kind, field in (("ConfigMap", "configMapKeyRef"), ("Secret", "secretKeyRef")):
        if reference := source.get(field):
            namespace, name, key = pod["metadata"]["namespace"], reference["name"], reference["key"]
            data = await read_data(kind, namespace, name, reference, lookup)
            if key in data:
                return _text(data[key])
            if reference.get("optional"):
                return None
            raise ConfigError(f"couldn't find key {key} in {kind} {namespace}/{name}")
    raise ConfigError(
        f"valueFrom {', '.join(sorted(source)) or 'without a source'} is not supported here; use "
        "fieldRef, configMapKeyRef or secretKeyRef"
    )


def _text(value: bytes) -> str:
    return value.decode("utf-8", "replace")


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
