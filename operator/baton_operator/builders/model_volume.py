"""The volume and the path of the model in a pod, and the init container that fetches the model."""

from __future__ import annotations

import re

import msgspec

from baton_kube.client import Object
from baton_operator import names
from baton_operator.api.field_types import quantity_bytes
from baton_operator.api.spec_model import IMAGE_URI, Model, needs_download
from baton_protocol.options.config import ENGINE_HTTP_PORT

VOLUME = "model"
#: Name of the init container.
FETCHER = "model"
FOLDER = "/models"
TERMINATION_LOG = "/dev/termination-log"
_SHARED_RESOURCES = ("cpu", "memory", "ephemeral-storage")


class ModelSource(msgspec.Struct, frozen=True):
    """Where a container finds the model: the path, the volume and the mount."""

    #: Folder of the model in the container.
    path: str
    volume: Object
    #: Read-only mount of the volume in the serving container.
    mount: Object


def source(model: Model, role: names.ConfiguredRole, namespace: str) -> ModelSource:
    """Return the path, the volume and the mount of the model for pods of `role` in a namespace.

    A host path is mounted at the same path in the container. The volume has no `type`, so the
    kubelet does not check that the folder exists. The engine's error message for a missing folder
    is clearer than the kubelet's.

    Args:
        model: the model. Its `uri` matches `spec_model.MODEL_URI`.
    """
    scheme, _, rest = model.uri.partition("://")
    if scheme == "file":
        path = rest.rstrip("/")
        return ModelSource(path, {"name": VOLUME, "hostPath": {"path": path}}, _mount(path))
    if scheme == "pvc":
        claim = rest.partition("/")[0]
        volume: Object = {
            "name": VOLUME,
            "persistentVolumeClaim": {"claimName": claim, "readOnly": True},
        }
        return ModelSource(f"{FOLDER}/{rest.rstrip('/')}", volume, _mount(f"{FOLDER}/{claim}"))
    if scheme == "image":
        match = re.fullmatch(IMAGE_URI, model.uri)
        assert match is not None, "the CRD accepts no other URI"
        volume = {"name": VOLUME, "image": {"reference": match[1], "pullPolicy": "IfNotPresent"}}
        return ModelSource(
            f"{FOLDER}/image{(match[5] or '').rstrip('/')}", volume, _mount(f"{FOLDER}/image")
        )
    return ModelSource(
        f"{FOLDER}/{_folder_name(model, role, namespace)}", _cache_volume(model), _mount(FOLDER)
    )


def fetcher(
    model: Model,
    role: names.ConfiguredRole,
    namespace: str,
    *,
    image: str,
    env: list[Object],
    security: Object,
    resources: Object | None,
) -> Object | None:
    """Return the init container that fetches the model; None if no fetch is needed.

    Args:
        env: environment variables that are added to those of the init container.
        security: security context of the init container.
        resources: resources of the serving container. The init container gets the same CPU and
            memory, but no devices.
    """
    if not needs_download(model.uri):
        return None
    limit = model.cache.size_limit if model.cache else None
    path = source(model, role, namespace).path
    # `$$` is an escaped `$`. Kubernetes replaces `$(NAME)` in commands by an environment variable,
    # which may be a credential.
    uri = model.uri.replace("$", "$$")
    command = ["baton-model", "fetch", "--uri", uri, "--to", path]
    command += (
        ["--only", "tokenizer"] if role == "gateway" else ["--http-port", str(ENGINE_HTTP_PORT)]
    )
    command += ["--max-bytes", str(quantity_bytes(limit))] if limit else []
    container: Object = {
        "name": FETCHER,
        "image": image,
        "command": [*command, "--termination-log", TERMINATION_LOG],
        "env": [*env, {"name": "HF_HOME", "value": "/tmp/huggingface"}],
        "volumeMounts": [
            {"name": VOLUME, "mountPath": FOLDER},
            {"name": "tmp", "mountPath": "/tmp"},
        ],
        "terminationMessagePath": TERMINATION_LOG,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": security,
    }
    if model.credentials_secret:
        container["envFrom"] = [{"secretRef": {"name": model.credentials_secret}}]
    shares = {
        kind: {
            name: amount for name, amount in (amounts or {}).items() if name in _SHARED_RESOURCES
        }
        for kind, amounts in (resources or {}).items()
        if kind in ("requests", "limits")
    }
    if any(shares.values()):
        container["resources"] = {kind: amounts for kind, amounts in shares.items() if amounts}
    return container


def _folder_name(model: Model, role: names.ConfiguredRole, namespace: str) -> str:
    """Return the name of the model's folder in the cache. All engine pods use the same name.

    The gateway's folder has another name, because the gateway fetches only the tokenizer. If
    the cache is a hostPath, which several namespaces may share, the name begins with the namespace.
    So no service gets a model that was fetched with the credentials of another namespace.
    """
    readable = re.sub(r"[^A-Za-z0-9.-]+", "-", model.uri.partition("://")[2])[:80].strip("-.")
    owner = f"{namespace}." if model.cache is not None and model.cache.host_path else ""
    suffix = "-tokenizer" if role == "gateway" else ""
    return f"{owner}{readable}-{names.content_hash(model.uri)}{suffix}"


def _cache_volume(model: Model) -> Object:
    cache = model.cache
    if cache is not None and cache.host_path:
        return {"name": VOLUME, "hostPath": {"path": cache.host_path, "type": "DirectoryOrCreate"}}
    if cache is not None and cache.claim:
        return {"name": VOLUME, "persistentVolumeClaim": {"claimName": cache.claim}}
    return {
        "name": VOLUME,
        "emptyDir": {"sizeLimit": cache.size_limit} if cache and cache.size_limit else {},
    }


def _mount(path: str) -> Object:
    return {"name": VOLUME, "mountPath": path, "readOnly": True}
