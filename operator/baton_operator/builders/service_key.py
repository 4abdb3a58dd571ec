"""The Secret with the key that all processes of one service share, and its mounts.

The operator draws the key at random once. The Secret is immutable. To change the key, delete the
Secret, and the operator draws another key.

An id of the key is part of every pod template, so a new key replaces pods like any other change.
Old and new pods cannot connect to each other. New gateways send requests to new engines, and old
gateways and engines keep serving until the new ones are ready.
"""

from __future__ import annotations

import base64
import binascii
import secrets

from baton_kube.client import Object
from baton_operator import names
from baton_operator.builders.resolved_service import ResolvedService
from baton_protocol.service_key import ServiceKey

ENTRY = "key"
MOUNT_PATH = "/etc/baton/service-key"
FILE = f"{MOUNT_PATH}/{ENTRY}"
VOLUME = "service-key"


def generate() -> bytes:
    """Return a new key: 32 random bytes in hex."""
    return secrets.token_hex(32).encode()


def secret(resolved: ResolvedService, key: bytes) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": resolved.metadata(names.service_key_name(resolved.name)),
        "type": "Opaque",
        "immutable": True,
        "data": {ENTRY: base64.b64encode(key).decode()},
    }


def read(obj: Object) -> ServiceKey:
    """Return the key in a Secret.

    Raises:
        ValueError: the Secret has no usable key.
    """
    encoded = (obj.get("data") or {}).get(ENTRY)
    if encoded is None:
        raise ValueError(f"it has no entry {ENTRY!r}")
    try:
        return ServiceKey(base64.b64decode(encoded, validate=True).strip())
    except binascii.Error as error:
        raise ValueError(f"its entry {ENTRY!r} is not base64: {error}") from error


def name_of(key: ServiceKey) -> str:
    """Return ten hex digits that identify the key without revealing it."""
    return key.secret("name").hex()[:10]


def volume(resolved: ResolvedService) -> Object:
    """Return the volume.

    Every user can read it, because an overlay may change the container's user.
    """
    return {
        "name": VOLUME,
        "secret": {"secretName": names.service_key_name(resolved.name), "defaultMode": 0o444},
    }


def mount() -> Object:
    return {"name": VOLUME, "mountPath": MOUNT_PATH, "readOnly": True}


def pod_annotations(resolved: ResolvedService) -> dict[str, str]:
    """Return the annotations of pod templates. A new key makes a new revision."""
    return {names.ANNOTATION_SERVICE_KEY: resolved.key_name} if resolved.key_name else {}
