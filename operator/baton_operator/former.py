"""The former revision: of the last spec with which the whole service was ready, while another one is rolled out.

`plan.py` says when members of it are made again.
"""

from __future__ import annotations

from typing import Any

import msgspec

from baton_operator import names
from baton_operator.api import decode_spec
from baton_operator.builders import config
from baton_operator.builders.member import MemberTemplate
from baton_operator.builders.owner import Owner
from baton_operator.history import recorded_spec
from baton_operator.kube import Kube
from baton_operator.rules import violations

Object = dict[str, Any]


class Former(msgspec.Struct, frozen=True):
    """What a member of the former revision is made of."""

    template: MemberTemplate
    config_map: Object


def served_name(service: Object) -> str | None:
    """Of the record of that spec, as the service's status says."""
    return (service.get("status") or {}).get("servedRevision")


async def find_former(
    kube: Kube, owner: Owner, service: Object, newest: str | None, templates: dict[names.MemberRole, MemberTemplate]
) -> dict[names.MemberRole, Former]:
    """By role; a role that is missing is not changed by the rollout, or its former members cannot be made again.

    Args:
        newest: name of the record of the spec that is rolled out.
        templates: of the newest revision.

    Raises:
        KubeError: the records cannot be read.
    """
    name = served_name(service)
    if name is None or name == newest:
        return {}
    spec = await recorded_spec(kube, service, name)
    return {} if spec is None else former_of(owner, spec, templates)


def former_of(
    owner: Owner, spec: Object, templates: dict[names.MemberRole, MemberTemplate]
) -> dict[names.MemberRole, Former]:
    """Pure. Ranks of expert-parallel groups have none: whoever is made must be able to join the topology."""
    try:
        decoded = decode_spec(spec)
        if violations(decoded):
            return {}
        former_owner = msgspec.structs.replace(owner, spec=decoded)
        found: dict[names.MemberRole, Former] = {}
        for role, newest in templates.items():
            if newest.expert_group or former_owner.expert_group(role):
                continue
            if role == "prefill" and not former_owner.has_prefill:
                continue
            template = MemberTemplate(former_owner, role)
            if template.revision != newest.revision:
                found[role] = Former(template, config.config_map(former_owner, role))
    except ValueError:  # another version of the operator recorded it
        return {}
    return found
