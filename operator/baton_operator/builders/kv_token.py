"""The secret that the engines of one service share: only who proves it in the handshake may touch KV memory.

Drawn at random once, when the service has none. Members read it when they start: to change it, delete the Secret and then the pods.
"""

from __future__ import annotations

import base64

from baton_operator import names
from baton_operator.builders.owner import Object, Owner

KEY = "token"
MOUNT_PATH = "/etc/baton-kv-token"
FILE = f"{MOUNT_PATH}/{KEY}"


def secret(owner: Owner, token: bytes) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": owner.metadata(names.kv_token_name(owner.name)),
        "type": "Opaque",
        "data": {KEY: base64.b64encode(token).decode()},
    }


def volume(owner: Owner) -> Object:
    return {"name": "kv-token", "secret": {"secretName": names.kv_token_name(owner.name), "defaultMode": 0o444}}


def mount() -> Object:
    return {"name": "kv-token", "mountPath": MOUNT_PATH, "readOnly": True}
