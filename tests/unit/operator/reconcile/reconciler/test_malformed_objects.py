"""Malformed objects, copied pods and defects of the operator.

They are reported, the members of the recorded spec keep running, and other services are not
affected.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from baton_kube.client import Object
from baton_operator import names
from baton_operator.builders.gateway import gateway_deployment
from baton_operator.builders.member_pods import MemberTemplate
from baton_operator.builders.pod_template.free_form_fields import MAX_DEPTH
from baton_operator.plan.plan_members import plan_members
from baton_operator.reconcile import member_reconciler, reconciler
from baton_operator.reconcile.desired import compute_desired
from support.operator.services import resolved
from support.operator.simulation.api_server import service_path
from support.operator.simulation.simulated_service import KEY, NAME, Service

SPEC: Object = {
    "model": {"uri": "hf://o/m"},
    "prefill": {"replicas": 1},
    "decode": {"replicas": 2},
    "gateway": {"replicas": 1},
}


def with_engine(**fields: Any) -> Object:
    return {"decode": {"template": {"spec": {"containers": [{"name": "engine", **fields}]}}}}


def deep(levels: int) -> Object:
    value: Object = {}
    for _ in range(levels):
        value = {"a": value}
    return value


MALFORMED: list[tuple[Object, str]] = [
    (with_engine(env={"FOO": "bar"}), "decode.template.spec.containers[engine].env must be a list"),
    (with_engine(env="x"), "decode.template.spec.containers[engine].env must be a list"),
    (
        with_engine(env=["FOO=bar"]),
        "decode.template.spec.containers[engine].env[0] must be an object with 'name'",
    ),
    (
        with_engine(resources="x"),
        "decode.template.spec.containers[engine].resources must be an object",
    ),
    (
        {
            "gateway": {
                "template": {"spec": {"containers": [{"name": "gateway", "env": {"FOO": "bar"}}]}}
            }
        },
        "gateway.template.spec.containers[gateway].env must be a list",
    ),
    (
        {"decode": {"template": {"metadata": {"annotations": "x"}}}},
        "decode.template.metadata.annotations must be an object",
    ),
    (
        {"decode": {"template": {"metadata": {"annotations": {"a": {"b": "c"}}}}}},
        "decode.template.metadata.annotations.a must be a string",
    ),
    (
        {"decode": {"template": {"metadata": {"labels": {"a": 1}}}}},
        "decode.template.metadata.labels.a must be a string",
    ),
    (
        {"decode": {"template": {"spec": {"volumes": "x" * 10**4}}}},
        "decode.template.spec.volumes must be a list",
    ),
    ({"prefill": {"template": {"spec": "none"}}}, "prefill.template.spec must be an object"),
    ({"decode": {"template": deep(300)}}, "decode.template is nested more than"),
    ({"decode": {"resources": {"limits": "x"}}}, "decode.resources.limits must be an object"),
    (
        {"decode": {"resources": {"limits": {"cpu": [1]}}}},
        "decode.resources.limits.cpu must be a quantity",
    ),
    ({"decode": {"resources": {"more": deep(300)}}}, "decode.resources is nested more than"),
    (
        {"decode": {"engine": {"extraArgs": ["--no-bind-threads", "--watermark=2"]}}},
        "decode.engine.extraArgs[1]: --watermark must be in [0, 1), got 2.0",
    ),
]


@pytest.fixture
def simulated() -> Iterator[Service]:
    found = Service()
    yield found
    found.close()


def member_names(simulated: Service) -> set[str]:
    return {pod["metadata"]["name"] for pod in simulated.pods()}


# Templates and resources


@pytest.mark.parametrize(("edit", "message"), MALFORMED)
def test_a_malformed_edit_is_reported_and_the_previous_members_are_kept(
    simulated: Service, edit: Object, message: str
) -> None:
    simulated.create(SPEC)
    simulated.settle()
    simulated.patch(edit)
    simulated.nodes.pod_vanishes(f"{NAME}-decode-1")
    simulated.rounds(4)
    ready, generation = simulated.condition(), simulated.object()["metadata"]["generation"]
    assert (ready["status"], ready["reason"], ready["observedGeneration"]) == (
        "False",
        "InvalidSpec",
        generation,
    )
    assert ready["message"].startswith(f"spec: {message}")
    assert len(ready["message"]) < 1000
    assert member_names(simulated) == {f"{NAME}-prefill-0", f"{NAME}-decode-0", f"{NAME}-decode-1"}
    assert simulated.condition("DecodeReady")["status"] == "True"
    (event,) = [
        event for event in simulated.server.list("events") if event["reason"] == "InvalidSpec"
    ]
    assert (event["type"], event["count"]) == ("Warning", 1)
    assert message in event["message"]
    simulated.patch({"decode": {"replicas": 3}})
    simulated.rounds(4)
    assert f"{NAME}-decode-3" not in member_names(simulated)
    assert f"{NAME}-decode-2" in member_names(simulated), "new sizes must apply, as in a pause"
    simulated.patch(
        {
            group: {"template": None, "resources": None, "engine": None}
            for group in ("prefill", "decode", "gateway")
        }
    )
    simulated.settle()


@pytest.mark.parametrize(("edit", "message"), MALFORMED)
def test_a_new_malformed_service_is_reported(
    simulated: Service, edit: Object, message: str
) -> None:
    simulated.create({**SPEC, **{role: {**SPEC[role], **fields} for role, fields in edit.items()}})
    simulated.reconcile()
    assert simulated.condition()["reason"] == "InvalidSpec"
    assert message in simulated.condition()["message"]
    assert not simulated.pods()


KEYS = st.sampled_from(
    [
        *(
            "metadata",
            "labels",
            "annotations",
            "spec",
            "containers",
            "initContainers",
            "volumes",
            "env",
            "name",
            "ports",
        ),
        *(
            "volumeMounts",
            "mountPath",
            "resources",
            "limits",
            "requests",
            "claims",
            "command",
            "securityContext",
            "a.env",
        ),
        *(
            "tolerations",
            "startupProbe",
            "httpGet",
            "configMap",
            "cpu",
            names.LABEL_ROLE,
            names.ANNOTATION_SERVICE_KEY,
        ),
    ]
)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from(["", "engine", "gateway", "model", "config", "tmp", "http", "x", "4"]),
)
JSON = st.recursive(
    SCALARS,
    lambda below: st.lists(below, max_size=3) | st.dictionaries(KEYS, below, max_size=4),
    max_leaves=12,
)


def shaped(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Draw mostly objects with some of these fields."""
    return st.one_of(
        st.fixed_dictionaries({}, optional=fields), st.fixed_dictionaries(fields), JSON
    )


CONTAINERS = st.lists(
    shaped(
        name=st.sampled_from(["engine", "gateway", "model", "other"]),
        env=st.lists(shaped(name=st.sampled_from(["POD_IP", "A"]), value=JSON), max_size=2) | JSON,
        resources=JSON,
        volumeMounts=JSON,
        ports=JSON,
    ),
    max_size=3,
)
TEMPLATES = shaped(
    metadata=shaped(labels=JSON, annotations=JSON),
    spec=shaped(
        containers=CONTAINERS | JSON,
        initContainers=CONTAINERS | JSON,
        volumes=JSON,
        securityContext=JSON,
    ),
).filter(lambda value: isinstance(value, dict))
RESOURCES = shaped(limits=JSON, requests=JSON, claims=JSON).filter(
    lambda value: isinstance(value, dict)
)


@settings(max_examples=400, deadline=None)
@given(
    TEMPLATES,
    RESOURCES,
    st.sampled_from(["prefill", "decode", "gateway"]),
    st.sampled_from(["hf", "file"]),
)
@example({}, {"limits": False}, "decode", "hf")
@example({"metadata": {"annotations": ""}}, {}, "gateway", "file")
@example(
    {"spec": {"containers": [{"name": "engine", "resources": {"claims": []}}]}},
    {"claims": [{"name": []}]},
    "decode",
    "hf",
)
def test_any_json_gives_objects_or_an_error_with_the_field(
    template: Object, resources: Object, role: str, scheme: str
) -> None:
    uri = {"hf": "hf://o/m", "file": "file:///m"}[scheme]
    groups: Object = {"prefill": {}, "decode": {}, "gateway": {"tls": {"secretName": "s"}}}
    groups[role] |= {"template": template, "resources": resources}
    wanted = resolved(model={"uri": uri}, key_name="k1", **groups)
    try:
        found = compute_desired(wanted, "policy/v1", operator_namespace="ns", http_routes=True)
    except ValueError as error:
        message = str(error)
    else:
        message = ""
    if message:
        assert message.startswith((f"{role}.template", f"{role}.resources"))
        return
    for member_role, made in found.members.items():
        pod = made.pod(3)
        assert pod["metadata"]["labels"].items() >= names.selector("demo", member_role).items()
        assert pod["metadata"]["annotations"][names.ANNOTATION_SERVICE_KEY] == "k1"
    (front,) = [obj for obj in found.objects if obj["kind"] == "Deployment"]
    assert {"POD_IP"} <= {
        each["name"] for each in front["spec"]["template"]["spec"]["containers"][0]["env"]
    }


def test_templates_as_deep_as_pods_are_accepted() -> None:
    assert MemberTemplate(
        resolved(decode={"template": {"spec": {"affinity": deep(MAX_DEPTH - 10)}}}), "decode"
    ).pod(0)
    assert gateway_deployment.build(
        resolved(gateway={"template": {"metadata": {"annotations": {"a": None}}}})
    )


# Statuses and pods of other clients


def test_a_size_out_of_bounds_in_the_status_creates_no_pod(simulated: Service) -> None:
    simulated.create(
        {
            **SPEC,
            "decode": {"autoscaling": {"minReplicas": 1, "maxReplicas": 1, "itlMilliseconds": 50}},
        }
    )
    simulated.settle()
    written = {"status": {"decode": {"autoscaling": {"size": 4}}}}
    simulated.server.request(
        "PATCH", service_path(NAME) + "/status", written, {}, "application/merge-patch+json"
    )
    simulated.operator_restarts()
    for _ in range(4):
        simulated.reconcile()
        assert member_names(simulated) == {f"{NAME}-prefill-0", f"{NAME}-decode-0"}
        simulated.world(lambda: True, 6.0)


@pytest.mark.parametrize(
    "name", [f"{NAME}-decode-copy", f"{NAME}-decode-01", f"{NAME}-decode-0-copy", "x"]
)
def test_a_copy_of_a_member_is_ignored(simulated: Service, name: str) -> None:
    simulated.create(SPEC)
    simulated.settle()
    copied = simulated.server.get("pods", f"{NAME}-decode-0")
    kept = {
        field: copied["metadata"][field] for field in ("labels", "annotations", "ownerReferences")
    }
    copy = simulated.server.put(
        {"metadata": {"name": name, **kept}, "spec": copied["spec"]}, "pods"
    )
    simulated.nodes.pod_vanishes(f"{NAME}-decode-1")
    simulated.rounds(4)
    assert simulated.condition()["reason"] == "AllGroupsReady"
    assert simulated.object()["status"]["decode"]["replicas"] == 2
    assert simulated.server.get("pods", f"{NAME}-decode-1") is not None
    simulated.patch({"engine": {"maxNumSeqs": 4}})
    simulated.rounds(30)
    assert simulated.server.get("pods", name) == copy
    assert simulated.condition()["reason"] == "AllGroupsReady"
    (mounted,) = [
        volume["configMap"]["name"] for volume in copy["spec"]["volumes"] if "configMap" in volume
    ]
    assert simulated.server.get("configmaps", mounted) is not None, (
        "a ConfigMap that the copy mounts was deleted"
    )
    simulated.server.remove("pods", name)
    simulated.settle()


def test_names_of_members() -> None:
    for ordinal in (0, 7, 10, 256):
        assert names.is_member_name(names.member_name("a.b", "decode", ordinal), "a.b", "decode")
    for other in (
        "a-b-decode-0",
        "a.b-prefill-0",
        "a.b-decode-00",
        "a.b-decode-٣",
        "a.b-decode-0\n",
        "xa.b-decode-0",
    ):
        assert not names.is_member_name(other, "a.b", "decode")
    assert not names.is_member_name("a.b-gateway-0", "a.b", "gateway")
    assert not names.is_member_name("a.b-None-0", "a.b", None)


# Defects


class DefectError(Exception):
    """An unexpected error."""


def fails(*_: Any, **__: Any) -> Any:
    raise DefectError("of the test")


def fail_in_step(simulated: Service) -> None:
    with pytest.raises(DefectError):
        simulated.reconcile()


@pytest.mark.parametrize(
    ("module", "place"),
    [
        (reconciler, "observe"),
        (reconciler, "apply_objects"),
        (member_reconciler, "find_previous_revisions"),
        (member_reconciler, "plan_members"),
        (reconciler, "delete_unused_config_maps"),
        (reconciler, "gateway_group"),
        (reconciler, "report"),
    ],
)
def test_a_defect_in_any_step_is_reported_and_retried(
    simulated: Service, monkeypatch: pytest.MonkeyPatch, module: ModuleType, place: str
) -> None:
    simulated.create(SPEC)
    simulated.settle()
    before = member_names(simulated)
    with monkeypatch.context() as broken:
        broken.setattr(module, place, fails)
        for _ in range(2):
            fail_in_step(simulated)
            ready, generation = simulated.condition(), simulated.object()["metadata"]["generation"]
            assert (ready["status"], ready["reason"]) == ("False", "InternalError")
            assert "DefectError: of the test" in ready["message"]
            assert (
                ready["observedGeneration"]
                == simulated.object()["status"]["observedGeneration"]
                == generation
            )
            simulated.patch({"engine": {"maxNumSeqs": 4}})
        assert member_names(simulated) >= before
        assert "InternalError" in {event["reason"] for event in simulated.server.list("events")}
    simulated.settle()
    assert simulated.condition()["reason"] == "AllGroupsReady"


def test_a_spec_that_causes_a_defect_is_reported_and_the_previous_members_are_kept(
    simulated: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulated.create(SPEC)
    simulated.settle()
    right = reconciler.compute_desired

    def defect(wanted: Any, *args: Any, **options: Any) -> Any:
        return fails() if wanted.spec.engine.max_num_seqs == 4 else right(wanted, *args, **options)

    with monkeypatch.context() as broken:
        broken.setattr(reconciler, "compute_desired", defect)
        simulated.patch({"engine": {"maxNumSeqs": 4}})
        simulated.nodes.pod_vanishes(f"{NAME}-decode-1")
        for _ in range(6):
            fail_in_step(simulated)
            simulated.world(lambda: True, 6.0)
        assert simulated.condition()["reason"] == "InternalError"
        assert simulated.condition("DecodeReady")["status"] == "True"
        assert f"{NAME}-decode-1" in member_names(simulated)
        simulated.operator_restarts()
        fail_in_step(simulated)
        assert f"{NAME}-decode-1" in member_names(simulated)
    simulated.reconcile()
    simulated.settle()


def test_a_defect_in_one_group_does_not_delay_the_other(
    simulated: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulated.create(SPEC)
    simulated.settle()

    def defect(resolved: Any, role: str, *args: Any, **options: Any) -> Any:
        return fails() if role == "prefill" else plan_members(resolved, role, *args, **options)

    monkeypatch.setattr(member_reconciler, "plan_members", defect)
    simulated.nodes.pod_vanishes(f"{NAME}-decode-1")
    for _ in range(6):
        fail_in_step(simulated)
        simulated.world(lambda: True, 6.0)
    assert f"{NAME}-decode-1" in member_names(simulated)
    assert simulated.condition()["reason"] == "InternalError"
    assert simulated.condition("DecodeReady")["status"] == "True"


def test_a_defect_in_the_error_handling_is_logged_and_the_first_one_is_raised(
    simulated: Service, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    simulated.create(SPEC)
    simulated.settle()
    monkeypatch.setattr(reconciler, "observe", fails)
    monkeypatch.setattr(reconciler, "report_defect", lambda *_, **__: 1 / 0)
    with caplog.at_level(logging.ERROR):
        fail_in_step(simulated)
    (record,) = [record for record in caplog.records if record.name == reconciler.__name__]
    assert record.exc_info[0] is ZeroDivisionError
    assert str(KEY) in record.getMessage()
