"""Names, labels and annotations of a service's objects (docs/internals/pods.md).

`baton_protocol.process.pod_labels` declares the labels and annotations that other components read.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

# `as` exports the imported names from this module.
from baton_protocol.process.pod_labels import ANNOTATION_DRAINING as ANNOTATION_DRAINING
from baton_protocol.process.pod_labels import ANNOTATION_SCALED_TO_ZERO as ANNOTATION_SCALED_TO_ZERO
from baton_protocol.process.pod_labels import GROUP as GROUP
from baton_protocol.process.pod_labels import LABEL_ROLE as LABEL_ROLE
from baton_protocol.process.pod_labels import LABEL_SERVICE as LABEL_SERVICE

VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "LLMService"
PLURAL = "llmservices"
SERVICE_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
#: Characters of a service's name. The limit leaves room for `-prefill-<ordinal>` and hashes in a
#: DNS label.
MAX_NAME_LENGTH = 40

#: Field manager of server-side apply, value of the managed-by label, source of Events.
MANAGER = "baton-operator"

LABEL_REVISION = f"{GROUP}/revision"
LABEL_MEMBER = f"{GROUP}/member"  #: On prefill and decode pods. The headless Service selects it.
LABEL_MANAGED_BY = "app.kubernetes.io/managed-by"

ANNOTATION_DRAIN_STARTED = f"{GROUP}/drain-started"
#: On ranks: the id of the expert group. Only ranks with the same id can share a topology.
#: Independent engines do not have this annotation.
ANNOTATION_EXPERT_GROUP = f"{GROUP}/expert-group"
#: On pods: the id of the service key with which the pod was created.
ANNOTATION_SERVICE_KEY = f"{GROUP}/service-key"
#: Hash of the object as last applied. It also changes when the operator no longer sets a field.
ANNOTATION_APPLIED = f"{GROUP}/applied"


class Key(NamedTuple):
    """The namespace and name of one service."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


MemberRole = Literal["prefill", "decode"]
#: Roles whose component reads a configuration file.
ConfiguredRole = Literal[MemberRole, "gateway"]
Role = Literal[ConfiguredRole, "coordinator"]
MEMBER_ROLES: tuple[MemberRole, ...] = ("prefill", "decode")
CONFIGURED_ROLES: tuple[ConfiguredRole, ...] = (*MEMBER_ROLES, "gateway")


def labels(service: str, role: Role | None = None) -> dict[str, str]:
    """Return the labels of an object of `service`; with `role`, also the labels of that role."""
    common = {
        "app.kubernetes.io/name": "baton",
        "app.kubernetes.io/instance": service,
        LABEL_MANAGED_BY: MANAGER,
        LABEL_SERVICE: service,
    }
    if role is not None:
        common |= {"app.kubernetes.io/component": role, LABEL_ROLE: role}
    return common


def selector(service: str, role: Role) -> dict[str, str]:
    """Return the labels that select the pods of `role`."""
    return {LABEL_SERVICE: service, LABEL_ROLE: role}


def serialized(match: dict[str, str]) -> str:
    """Return the labels `match` as a labelSelector parameter, for example `a=b,c=d`."""
    return ",".join(f"{key}={value}" for key, value in match.items())


def keys_of(kind: str, metadata: Mapping[str, Any]) -> Iterator[Key]:
    """Yield the key of each service to which an object belongs.

    An LLMService belongs to itself. For any other object, the label LABEL_SERVICE and the
    controlling owner name the service. Both are used, because another client may have changed the
    label.
    """
    namespace = metadata["namespace"]
    if kind == KIND:
        yield Key(namespace, metadata["name"])
        return
    owners = {
        each["name"]
        for each in metadata.get("ownerReferences") or ()
        if each.get("controller") and (each["apiVersion"], each["kind"]) == (API_VERSION, KIND)
    }
    found = owners | {(metadata.get("labels") or {}).get(LABEL_SERVICE, "")}
    yield from (Key(namespace, name) for name in found if SERVICE_NAME.fullmatch(name))


def member_name(service: str, role: MemberRole, ordinal: int) -> str:
    return f"{service}-{role}-{ordinal}"


def ordinal_of(member: str) -> int:
    """Return the ordinal at the end of `member`, the name of a prefill or decode pod.

    Raises:
        ValueError: `member` does not end with an ordinal.
    """
    return int(member.rpartition("-")[2])


def is_member_name(name: str, service: str, role: str | None) -> bool:
    """Return whether `name` is SERVICE-ROLE-ORDINAL, the name of a prefill or decode pod.

    Args:
        role: role of the pod. None: the pod has no role label, and the result is False.
    """
    return (
        role in MEMBER_ROLES
        and re.fullmatch(f"{re.escape(service)}-{role}-(0|[1-9][0-9]*)", name) is not None
    )


def gateway_name(service: str) -> str:
    return f"{service}-gateway"


def coordinator_name(service: str) -> str:
    return f"{service}-coordinator"


def service_key_name(service: str) -> str:
    """Return the name of the Secret with the service's key."""
    return f"{service}-key"


def engine_account_name(service: str) -> str:
    """Return the name of the ServiceAccount of engines and coordinator."""
    return f"{service}-engine"


def members_service_name(service: str) -> str:
    return f"{service}-members"


def url_host(host: str) -> str:
    """Return `host` as the host part of a URL, with brackets around an IPv6 address."""
    return f"[{host}]" if ":" in host else host


def content_hash(content: Any) -> str:
    """Return a hash of the JSON value `content` as ten hex digits."""
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    return hashlib.blake2b(canonical, digest_size=5).hexdigest()
