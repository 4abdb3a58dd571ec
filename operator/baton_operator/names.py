"""Names, labels and annotations of a service's objects (docs/internals/pods.md).

`baton_protocol.pod_labels` declares the names that other components also read.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any, Literal, NamedTuple

# `as` exports the imported names from this module.
from baton_protocol.pod_labels import ANNOTATION_DRAINING as ANNOTATION_DRAINING
from baton_protocol.pod_labels import GROUP as GROUP
from baton_protocol.pod_labels import LABEL_ROLE as LABEL_ROLE
from baton_protocol.pod_labels import LABEL_SERVICE as LABEL_SERVICE

VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "LLMService"
PLURAL = "llmservices"
SERVICE_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")

#: Field manager of server-side apply, value of the managed-by label, source of Events.
MANAGER = "baton-operator"

LABEL_REVISION = f"{GROUP}/revision"
LABEL_MEMBER = f"{GROUP}/member"  #: On member pods of either role. The headless Service selects it.
LABEL_MANAGED_BY = "app.kubernetes.io/managed-by"

ANNOTATION_DRAIN_STARTED = f"{GROUP}/drain-started"
#: On ranks: the expert group. Only ranks of one group can share a topology. Absent: an independent
#: engine.
ANNOTATION_EXPERT_GROUP = f"{GROUP}/expert-group"
#: On pods: identifies the service key with which they were created.
ANNOTATION_SERVICE_KEY = f"{GROUP}/service-key"
#: Hash of the object last applied. It reveals fields that the operator no longer sets.
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
    """Return the labels of every object made for `service`; `role` for objects of one group."""
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
    """Return the labels that select the pods of one group, and no other object."""
    return {LABEL_SERVICE: service, LABEL_ROLE: role}


def serialized(match: dict[str, str]) -> str:
    """Return `{"a": "b", "c": "d"}` as `a=b,c=d`, the form of the API's labelSelector parameter."""
    return ",".join(f"{key}={value}" for key, value in match.items())


def member_name(service: str, role: MemberRole, ordinal: int) -> str:
    return f"{service}-{role}-{ordinal}"


def ordinal_of(member: str) -> int:
    """Return the ordinal in a member's name.

    Raises:
        ValueError: `member` is not the name of a member.
    """
    return int(member.rpartition("-")[2])


def is_member_name(name: str, service: str, role: str | None) -> bool:
    """Return whether `name` is the name of a member of this role."""
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
    """Return `host` for a URL: an IPv6 address is put in brackets."""
    return f"[{host}]" if ":" in host else host


def content_hash(content: Any) -> str:
    """Return ten hex digits that change when the JSON value `content` does."""
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    return hashlib.blake2b(canonical, digest_size=5).hexdigest()
