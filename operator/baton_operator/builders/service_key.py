"""The key that all processes of one service share (`baton_protocol.service_key`): its Secret, and how pods get it.

Drawn at random once. The Secret is immutable: to change the key, delete it, and the operator draws another. What names the key is
part of every pod's template, so pods are then replaced as by any other change. Old and new ones do not talk to each other: new
gateways send to new engines only, and the old ones serve on until these are ready.
"""

from __future__ import annotations

import base64
import binascii
import secrets

from baton_operator import names
from baton_operator.builders.owner import Object, Owner
from baton_protocol.service_key import ServiceKey

ENTRY = "key"
MOUNT_PATH = "/etc/baton/service-key"
FILE = f"{MOUNT_PATH}/{ENTRY}"
VOLUME = "service-key"


def draw() -> bytes:
    """A new key: 32 random bytes, in hex."""
    return secrets.token_hex(32).encode()


def secret(owner: Owner, key: bytes) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": owner.metadata(names.service_key_name(owner.name)),
        "type": "Opaque",
        "immutable": True,
        "data": {ENTRY: base64.b64encode(key).decode()},
    }


def read(obj: Object) -> ServiceKey:
    """The key in a Secret, as its processes read it. Raises ValueError if there is none."""
    encoded = (obj.get("data") or {}).get(ENTRY)
    if encoded is None:
        raise ValueError(f"it has no entry {ENTRY!r}")
    try:
        return ServiceKey(base64.b64decode(encoded, validate=True).strip())
    except binascii.Error as error:
        raise ValueError(f"its entry {ENTRY!r} is not base64: {error}") from error


def name_of(key: ServiceKey) -> str:
    """Ten hex digits that change when the key does, and tell nothing of it."""
    return key.secret("name").hex()[:10]


def volume(owner: Owner) -> Object:
    """Readable by the container's user whoever that is: an overlay may change it, and nobody else is in the container."""
    return {
        "name": VOLUME,
        "secret": {"secretName": names.service_key_name(owner.name), "defaultMode": 0o444},
    }


def mount() -> Object:
    return {"name": VOLUME, "mountPath": MOUNT_PATH, "readOnly": True}


def pod_annotations(owner: Owner) -> dict[str, str]:
    """Of pod templates: another key makes another revision."""
    return {names.ANNOTATION_SERVICE_KEY: owner.key_name} if owner.key_name else {}
