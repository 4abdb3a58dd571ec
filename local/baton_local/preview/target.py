"""The desired state of an LLMService, and the changes between two desired states."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from baton_kube.client import Object
from baton_local.preview.steps import FieldChange, GroupChange
from baton_operator.api.rules import valid_spec
from baton_operator.autoscale.settings import settings_of
from baton_operator.builders.resolved_service import ResolvedService
from baton_operator.plan.plan_members import update_of
from baton_operator.reconcile.desired import Desired, compute_desired

#: Address of the coordinator's Service, which rank templates need.
COORDINATOR = "192.0.2.1"


class PreviewTarget(msgspec.Struct, frozen=True):
    """One LLMService and its desired state."""

    spec: Object
    desired: Desired

    @property
    def resolved(self) -> ResolvedService:
        return self.desired.resolved


def target_of(service: Object) -> PreviewTarget:
    """Compute the desired state of the LLMService in a manifest.

    Raises:
        ValueError: the spec is invalid; the message names the field.
    """
    metadata, spec = service["metadata"], valid_spec(service["spec"])
    resolved = ResolvedService(
        name=metadata["name"],
        namespace=metadata.get("namespace", "default"),
        uid="preview",
        spec=spec,
        coordinator=COORDINATOR if spec.decode.parallelism.expert else None,
        sizes={role: settings.initial for role, settings in settings_of(spec).items()},
    )
    return PreviewTarget(service["spec"], compute_desired(resolved, "policy/v1", http_routes=True))


def field_changes(old: PreviewTarget, new: PreviewTarget) -> Iterator[FieldChange]:
    """Yield each field in which the two specs differ. Unset fields count as their defaults."""
    return _differences(
        msgspec.to_builtins(old.resolved.spec), msgspec.to_builtins(new.resolved.spec), "spec"
    )


def group_changes(old: PreviewTarget | None, new: PreviewTarget) -> list[GroupChange]:
    groups = []
    for role, template in new.desired.members.items():
        update = update_of(new.resolved, role)
        group = GroupChange(
            role=role,
            sizes=(0 if old is None else old.resolved.replicas(role), new.resolved.replicas(role)),
            revisions=(
                "" if old is None else old.desired.members[role].revision,
                template.revision,
            ),
            max_surge=update.max_surge,
            max_unavailable=update.max_unavailable,
        )
        groups.append(group)
    return groups


def object_changes(old: PreviewTarget | None, new: PreviewTarget) -> dict[str, list[str]]:
    """Return the objects, except member pods, that an edit creates, changes and deletes.

    The result maps `creates`, `changes` and `deletes` to the kinds and names of objects.
    """
    targets = ([] if old is None else old.desired.objects, new.desired.objects)
    before, after = (
        {f"{each['kind']} {each['metadata']['name']}": each for each in found} for found in targets
    )
    return {
        "creates": [name for name in after if name not in before],
        "changes": [name for name in after if name in before and before[name] != after[name]],
        "deletes": [name for name in before if name not in after],
    }


def _differences(old: Any, new: Any, path: str) -> Iterator[FieldChange]:
    if isinstance(old, dict) and isinstance(new, dict):
        for field in sorted(old.keys() | new.keys()):
            yield from _differences(old.get(field), new.get(field), f"{path}.{field}")
    elif old != new:
        yield FieldChange(path=path, before=old, after=new)
