"""The Secret with the key that all processes of one service share, and its volume in pods.

The operator generates a random key and writes an immutable Secret. To change the key, delete the
Secret, and the operator generates another key.

Every pod template contains an id of the key, so a new key causes a rollout. Pods with the old key
and pods with the new key cannot connect to each other. Old gateways and engines keep serving until
the new gateways and engines are ready.
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
    """Return a new random key of 32 bytes, as 64 hex digits."""
    return secrets.token_hex(32).encode()


def build(resolved: ResolvedService, key: bytes) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": resolved.metadata(names.service_key_name(resolved.name)),
        "type": "Opaque",
        "immutable": True,
        "data": {ENTRY: base64.b64encode(key).decode()},
    }


def read(obj: Object) -> ServiceKey:
    """Return the service key in the Secret `obj`.

    Raises:
        ValueError: the Secret contains no valid key.
    """
    encoded = (obj.get("data") or {}).get(ENTRY)
    if encoded is None:
        raise ValueError(f"it has no entry {ENTRY!r}")
    try:
        return ServiceKey(base64.b64decode(encoded, validate=True).strip())
    except binascii.Error as error:
        raise ValueError(f"its entry {ENTRY!r} is not base64: {error}") from error


def name_of(key: ServiceKey) -> str:
    """Return the public name (id) of a key: ten hex digits that do not reveal the key."""
    return key.secret("name").hex()[:10]


def volume(resolved: ResolvedService) -> Object:
    """Return the pod volume with the service key.

    Every user in the container can read the key file, because the `template` in the spec may
    change the user of the container.
    """
    return {
        "name": VOLUME,
        "secret": {"secretName": names.service_key_name(resolved.name), "defaultMode": 0o444},
    }


def mount() -> Object:
    return {"name": VOLUME, "mountPath": MOUNT_PATH, "readOnly": True}


def pod_annotations(resolved: ResolvedService) -> dict[str, str]:
    """Return the pod annotation with the id of the service key; empty if there is no key yet."""
    return {names.ANNOTATION_SERVICE_KEY: resolved.key_name} if resolved.key_name else {}
