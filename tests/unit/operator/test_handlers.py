"""The kinds of objects whose events queue a reconcile."""

from __future__ import annotations

import kopf

from baton_operator import handlers as handlers  # registers them
from baton_operator.kube.objects import _RESOURCES

#: Kind that is not watched -> why.
UNWATCHED = {
    "Secret": "a watch needs the right to read all Secrets",
    "ControllerRevision": "it is read only in a pause and in a rollout",
    "Event": "the operator only writes Events",
    "Lease": "the Lease is read at an interval",
}


def test_every_kind_is_watched_except_those_with_a_reason() -> None:
    registry = kopf.get_default_registry()._watching
    watched = {
        kind
        for kind, (api_version, plural) in _RESOURCES.items()
        if registry.has_handlers(kopf.Resource(*_group_and_version(api_version), plural))
    }
    assert watched == _RESOURCES.keys() - UNWATCHED
    assert len(registry.get_all_selectors()) == len(watched), "an unknown kind is watched"


def _group_and_version(api_version: str) -> tuple[str, str]:
    group, _, version = api_version.rpartition("/")
    return group, version
