"""Edits replace only the pods whose template or configuration changes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton_kube.client import Object
from baton_operator.builders.gateway import gateway_deployment
from baton_operator.builders.member_pods import MemberTemplate
from support.operator.services import resolved

BASE: Object = {
    "model": {"uri": "file:///models/x"}, "image": "baton:1", "prefill": {"replicas": 1},
    "decode": {"replicas": 2},
    "gateway": {"replicas": 1},
}  # fmt: skip


def revisions(spec: Object) -> dict[str, str]:
    """Return the revisions by role."""
    made = resolved(coordinator="10.96.0.9", **spec)
    return {
        "prefill": MemberTemplate(made, "prefill").revision,
        "decode": MemberTemplate(made, "decode").revision,
        "gateway": gateway_deployment.revision_of(gateway_deployment.build(made)),
    }


def edited(path: str, value: Any) -> Object:
    spec = copy.deepcopy(BASE)
    *parents, field = path.split(".")
    node = spec
    for parent in parents:
        node = node.setdefault(parent, {})
    node[field] = value
    return spec


ENV = {"spec": {"containers": [{"name": "engine", "env": [{"name": "A", "value": "1"}]}]}}
GATEWAY_ENV = {"spec": {"containers": [{"name": "gateway", "env": [{"name": "A", "value": "1"}]}]}}
RESOURCES = {"limits": {"cpu": "2"}}

EDITS: list[tuple[str, Any, set[str]]] = [
    ("image", "baton:2", {"prefill", "decode", "gateway"}),
    ("model.uri", "file:///models/y", {"prefill", "decode", "gateway"}),
    # Engines use it as a metric label.
    (
        "model.servedName",
        "other",
        {"prefill", "decode", "gateway"},
    ),
    ("engine.maxNumSeqs", 7, {"prefill", "decode"}),
    ("engine.blockSize", 32, {"prefill", "decode"}),
    ("engine.extraArgs", ["--watermark=0.5"], {"prefill", "decode"}),
    ("prefill.engine", {"maxNumSeqs": 7}, {"prefill"}),
    ("decode.engine", {"diagnostics": {"claim": "c"}}, {"decode"}),
    ("decode.engine", {"maxNumSeqs": 64}, set()),  # the default
    ("kvTransfer.leaseSeconds", 7, {"prefill"}),
    ("kvTransfer.loadTimeoutSeconds", 7, {"decode"}),
    ("kvTransfer.mode", "push", {"prefill", "decode"}),
    ("prefill.template", ENV, {"prefill"}),
    ("prefill.resources", RESOURCES, {"prefill"}),
    ("prefill.parallelism", {"tensor": 2}, {"prefill"}),
    ("decode.template", ENV, {"decode"}),
    ("decode.resources", RESOURCES, {"decode"}),
    ("decode.parallelism", {"tensor": 2}, {"decode"}),
    ("gateway.template", GATEWAY_ENV, {"gateway"}),
    ("gateway.resources", RESOURCES, {"gateway"}),
    ("gateway.maxConcurrentRequests", 5, {"gateway"}),
    ("gateway.prefillThresholdTokens", 5, {"gateway"}),
    ("gateway.queueTimeoutSeconds", 5, {"gateway"}),
    ("gateway.resumeTimeoutSeconds", 5, {"gateway"}),
    ("gateway.stallTimeoutSeconds", 5, {"gateway"}),
    ("gateway.interTokenTimeoutSeconds", 5, {"gateway"}),
    ("gateway.requestTimeoutSeconds", 5, {"gateway"}),
    ("gateway.ingress", {"host": "a.example.com"}, set()),
    ("prefill.replicas", 0, set()),
    ("decode.replicas", 5, set()),
    ("gateway.replicas", 3, set()),
    ("updateStrategy", {"decode": {"maxSurge": "50%"}}, set()),
    ("progressDeadlineSeconds", 5, set()),
    ("paused", True, set()),
]


@pytest.mark.parametrize(("path", "value", "restarted"), EDITS, ids=[path for path, _, _ in EDITS])
def test_an_edit_of_one_field_changes_only_the_revisions_that_use_it(
    path: str, value: Any, restarted: set[str]
) -> None:
    before, after = revisions(BASE), revisions(edited(path, value))
    assert {role for role in before if before[role] != after[role]} == restarted


@settings(max_examples=60, deadline=None)
@given(
    tensor=st.sampled_from([1, 2, 4]),
    limit=st.integers(1, 10**6),
    threshold=st.integers(0, 10**6),
    group=st.sampled_from(["prefill", "decode", "gateway"]),
    value=st.text("ab", min_size=1),
)
def test_settings_of_a_group_do_not_change_other_revisions(
    tensor: int, limit: int, threshold: int, group: str, value: str
) -> None:
    spec = copy.deepcopy(BASE)
    container = "gateway" if group == "gateway" else "engine"
    env = [{"name": "A", "value": value}]
    spec[group]["template"] = {"spec": {"containers": [{"name": container, "env": env}]}}
    if group == "gateway":
        spec[group] |= {"maxConcurrentRequests": limit, "prefillThresholdTokens": threshold}
    else:
        spec[group]["parallelism"] = {"tensor": tensor}
    before, after = revisions(BASE), revisions(spec)
    assert [role for role in before if before[role] != after[role]] == [group]


def test_a_change_of_one_role_keeps_the_revisions_of_the_others() -> None:
    before, after = resolved(prefill={}), resolved(prefill={}, gateway={"maxConcurrentRequests": 5})
    for role in ("prefill", "decode"):
        assert MemberTemplate(before, role).revision == MemberTemplate(after, role).revision
    resized = resolved(
        prefill={"replicas": 0, "template": {"metadata": {"labels": {"a": "b"}}}},
        decode={"replicas": 9},
    )
    assert MemberTemplate(before, "decode").revision == MemberTemplate(resized, "decode").revision
    assert MemberTemplate(before, "prefill").revision != MemberTemplate(resized, "prefill").revision


def test_the_engine_configuration_is_part_of_the_revision() -> None:
    assert (
        MemberTemplate(resolved(), "decode").revision
        != MemberTemplate(resolved(engine={"maxNumSeqs": 5}), "decode").revision
    )
    assert (
        MemberTemplate(resolved(), "decode").revision
        != MemberTemplate(resolved(image="other:1"), "decode").revision
    )
