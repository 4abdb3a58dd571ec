"""Where a model is inside the container, and the volume that brings it there."""

from __future__ import annotations

from baton_operator.builders.owner import Object

VOLUME = "model"


def container_path(uri: str) -> str:
    """`file:///models/x` -> `/models/x`; `pvc://claim/x` -> `/models/claim/x`. `uri` matches api.MODEL_URI."""
    scheme, _, rest = uri.partition("://")
    return rest.rstrip("/") if scheme == "file" else f"/models/{rest.rstrip('/')}"


def volume(uri: str) -> tuple[Object, Object]:
    """The pod's volume and the container's mount of it, read-only.

    A host path is mounted at the same path. It has no type check: a missing folder must reach the engine, whose message names it.
    """
    scheme, _, rest = uri.partition("://")
    if scheme == "file":
        path = container_path(uri)
        return (
            {"name": VOLUME, "hostPath": {"path": path}},
            {"name": VOLUME, "mountPath": path, "readOnly": True},
        )
    claim = rest.partition("/")[0]
    return (
        {"name": VOLUME, "persistentVolumeClaim": {"claimName": claim, "readOnly": True}},
        {"name": VOLUME, "mountPath": f"/models/{claim}", "readOnly": True},
    )
