"""A restricted service uses only the folders of nodes and the annotations that are allowed."""

from __future__ import annotations

from typing import Any

import pytest

from baton_kube.client import Object
from baton_operator.builders.member_pods import MemberTemplate
from baton_operator.builders.restrictions import Restrictions
from baton_operator.reconcile.desired import compute_desired
from support.operator.services import resolved

ALLOWED = Restrictions(
    host_paths=("/mnt/models/", "/mnt/cache"),
    annotation_prefixes=("cert-manager.io/", "nginx.ingress.kubernetes.io/backend-protocol"),
)
HUB = {"uri": "hf://acme/x"}


def build(restrictions: Restrictions, **spec: Any) -> None:
    compute_desired(resolved(restrictions=restrictions, **spec), "policy/v1", http_routes=True)


@pytest.mark.parametrize(
    "spec",
    [
        {"model": {"uri": "file:///mnt/models"}},
        {"model": {"uri": "file:///mnt/models/llama/8b"}},
        {"model": {"uri": "file:///mnt//models/./llama/"}},
        {"model": {"uri": "file:///mnt/cache"}},
        {"model": {**HUB, "cache": {"hostPath": "/mnt/cache"}}},
        {"model": {**HUB, "cache": {"hostPath": "/mnt/cache/"}}},
        {"model": HUB, "engine": {"compileCache": {"hostPath": "/mnt/cache"}}},
        {"model": HUB, "decode": {"engine": {"diagnostics": {"hostPath": "/mnt/cache"}}}},
        {"model": {"uri": "pvc://models/x"}},
        {"model": {**HUB, "cache": {"claim": "cache"}}},
        {"model": HUB, "engine": {"compileCache": {"claim": "cache"}}},
    ],
    ids=str,
)
def test_allowed_folders_and_volumes_of_other_kinds_are_accepted(spec: Object) -> None:
    build(ALLOWED, **spec)


@pytest.mark.parametrize(
    ("field", "spec"),
    [
        ("model.uri", {"model": {"uri": "file:///var"}}),
        ("model.uri", {"model": {"uri": "file:///mnt"}}),
        ("model.uri", {"model": {"uri": "file:///mnt/models-of-others/x"}}),
        ("model.uri", {"model": {"uri": "file:///mnt/models/../../var/lib/kubelet"}}),
        ("model.uri", {"model": {"uri": "file:///mnt/cache/link-to-var"}}),
        ("model.cache.hostPath", {"model": {**HUB, "cache": {"hostPath": "//"}}}),
        ("model.cache.hostPath", {"model": {**HUB, "cache": {"hostPath": "/etc/kubernetes"}}}),
        ("model.cache.hostPath", {"model": {**HUB, "cache": {"hostPath": "/mnt/cache/../../etc"}}}),
        ("model.cache.hostPath", {"model": {**HUB, "cache": {"hostPath": "/mnt/cache/link"}}}),
        ("model.cache.hostPath", {"model": {**HUB, "cache": {"hostPath": "/mnt/models/x"}}}),
        (
            "engine.compileCache.hostPath",
            {"model": HUB, "engine": {"compileCache": {"hostPath": "/root"}}},
        ),
        (
            "engine.diagnostics.hostPath",
            {"model": HUB, "engine": {"diagnostics": {"hostPath": "/root"}}},
        ),
        (
            "decode.engine.compileCache.hostPath",
            {"model": HUB, "decode": {"engine": {"compileCache": {"hostPath": "/root"}}}},
        ),
        (
            "prefill.engine.diagnostics.hostPath",
            {"model": HUB, "prefill": {"engine": {"diagnostics": {"hostPath": "/root"}}}},
        ),
    ],
    ids=str,
)
def test_other_folders_of_nodes_are_refused_with_the_field_and_the_setting(
    field: str, spec: Object
) -> None:
    with pytest.raises(ValueError, match=r"setting hostPaths does not allow") as refused:
        build(ALLOWED, **spec)
    assert str(refused.value).startswith(f"{field}: ")
    with pytest.raises(ValueError, match=r"setting hostPaths does not allow"):
        build(Restrictions(), **spec)
    compute_desired(resolved(**spec), "policy/v1")  # unrestricted


def test_the_refusal_names_the_entry_that_would_allow_the_folder() -> None:
    for spec in (
        {"model": {"uri": "file:///var/models"}},
        {"model": {**HUB, "cache": {"hostPath": "/var/models"}}},
    ):
        with pytest.raises(ValueError, match="add ") as refused:
            build(Restrictions(), **spec)
        entry = str(refused.value).partition("add ")[2].split()[0]
        build(Restrictions(host_paths=(entry,)), **spec)


@pytest.mark.parametrize(
    ("host_paths", "message"),
    [
        (("models",), "absolute"),
        (("/",), "absolute"),
        (("/mnt/../etc",), "absolute"),
        (("/mnt/./models/",), "absolute"),
        (("/mnt/", "/mnt/cache"), "must not overlap with /mnt/:"),
        (("/mnt", "/mnt/cache"), "must not overlap with /mnt"),
        (("/mnt/cache/", "/mnt/cache"), "must not overlap with /mnt/cache/:"),
        (("/mnt/cache", "/mnt/cache/models/"), "must not overlap with /mnt/cache/models/:"),
    ],
)
def test_allowed_folders_that_permit_symbolic_links_are_refused(
    host_paths: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Restrictions(host_paths=host_paths)
    Restrictions(host_paths=("/mnt/cache", "/mnt/cache-of-models/", "/mnt/cache"))


def ingress(**annotations: str) -> Object:
    return {"model": HUB, "gateway": {"ingress": {"host": "a.example", "annotations": annotations}}}


def with_annotation(role: str, name: str) -> Object:
    return {"model": HUB, role: {"template": {"metadata": {"annotations": {name: "x"}}}}}


@pytest.mark.parametrize(
    "name",
    [
        "nginx.ingress.kubernetes.io/configuration-snippet",
        "nginx.ingress.kubernetes.io/server-snippet",
        "nginx.ingress.kubernetes.io/auth-url",
        "traefik.ingress.kubernetes.io/router.middlewares",
        "cert-manager.iox/issuer",
    ],
)
def test_annotations_that_controllers_execute_are_refused(name: str) -> None:
    specs = {
        "gateway.ingress.annotations": ingress(**{name: "x"}),
        "decode.template.metadata.annotations": with_annotation("decode", name),
        "gateway.template.metadata.annotations": with_annotation("gateway", name),
    }
    for field, spec in specs.items():
        with pytest.raises(ValueError, match=r"setting annotationPrefixes does not") as refused:
            build(ALLOWED, **spec)
        assert str(refused.value).startswith(f"{field}.{name}: ")
        compute_desired(resolved(**spec), None)  # unrestricted


def test_annotations_with_an_allowed_prefix_are_accepted() -> None:
    name = "cert-manager.io/cluster-issuer"
    for spec in (ingress(**{name: "ca"}), with_annotation("prefill", name)):
        build(ALLOWED, **spec)
        with pytest.raises(ValueError, match="annotationPrefixes"):
            build(Restrictions(), **spec)
    with pytest.raises(ValueError, match="must not be empty"):
        Restrictions(annotation_prefixes=("",))


def test_annotations_that_the_operator_sets_are_accepted() -> None:
    made = resolved(restrictions=Restrictions(), key_name="k", model=HUB)
    assert MemberTemplate(made, "decode").pod(0)["metadata"]["annotations"]
