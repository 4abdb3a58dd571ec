"""The chart's ValidatingAdmissionPolicy: its CEL expressions, and the objects around them.

The expressions are evaluated with the CEL library of the embedded control plane, which serves no
such policies.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import celpy
import helm_python as helm
import pytest
import yaml

from baton_kube.client import Object
from baton_operator.api.crd import custom_resource_definition
from pocketkube.apiserver.schema.structural import StructuralSchema
from support.install.rendered_chart import CHART, NAMESPACE, RELEASE, ROOT, kinds, one, render

SCHEMA = StructuralSchema(
    custom_resource_definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
)
HUB = {"uri": "hf://acme/x"}
SERVED = (
    '(.Capabilities.APIVersions.Has "admissionregistration.k8s.io/v1/ValidatingAdmissionPolicy")'
)
VALUES: Object = {
    "admissionPolicy": {"enabled": True},
    "hostPaths": ["/mnt/models/", "/mnt/cache"],
}


def render_on_new_server(values: Object) -> list[Object]:
    """Render the chart for an API server with ValidatingAdmissionPolicies.

    The renderer assumes a server that has no kinds.
    """
    with tempfile.TemporaryDirectory() as folder:
        chart = Path(folder) / "baton"
        shutil.copytree(CHART, chart)
        template = chart / "templates/admissionpolicy.yaml"
        assert SERVED in template.read_text()
        template.write_text(template.read_text().replace(SERVED, "true"))
        with helm.Chart.load(chart) as loaded:
            made = loaded.render(values, name=RELEASE, namespace=NAMESPACE)
    text = made["baton/templates/admissionpolicy.yaml"]
    return [obj for obj in yaml.safe_load_all(text) if obj]


def evaluate(expression: str, **names: Any) -> Any:
    environment = celpy.Environment()
    return environment.program(environment.compile(expression)).evaluate(names)


def policy(values: Object | None = None) -> Object:
    objects = render_on_new_server({**VALUES, **(values or {})})
    found: Object = one(objects, "ValidatingAdmissionPolicy")["spec"]
    return found


def refusals(spec: Object, values: Object | None = None) -> list[str]:
    """Return the messages with which the policy refuses a new LLMService."""
    rules = policy(values)
    stored = SCHEMA.default({"metadata": {}, "spec": {"model": HUB, **spec}})
    names = {"object": celpy.json_to_cel(stored)}
    variables = celpy.celtypes.MapType({})
    for variable in rules["variables"]:
        value = evaluate(variable["expression"], **names, variables=variables)
        variables[celpy.celtypes.StringType(variable["name"])] = value
    return [
        each["message"]
        for each in rules["validations"]
        if not evaluate(each["expression"], **names, variables=variables)
    ]


def template(role: str, **spec: Any) -> Object:
    return {role: {"template": {"spec": spec}}}


def container(**security: Any) -> list[Object]:
    return [{"name": "c", "securityContext": security}]


@pytest.mark.parametrize(
    ("says", "spec"),
    [
        ("hostNetwork", template("decode", hostNetwork=True)),
        ("hostPID", template("prefill", hostPID=True)),
        ("hostIPC", template("gateway", hostIPC=True)),
        ("serviceAccountName", template("decode", serviceAccountName="deployer")),
        ("serviceAccountName", template("decode", serviceAccountName=None)),
        ("serviceAccount", template("gateway", serviceAccount="deployer")),
        ("nodeName", template("decode", nodeName="control-plane")),
        ("privileged", template("decode", containers=container(privileged=True))),
        ("privileged", template("gateway", initContainers=container(privileged=True))),
        ("hostPath", template("decode", volumes=[{"name": "v", "hostPath": {"path": "/"}}])),
        *(
            ("model.uri", {"model": {"uri": f"file://{path}"}})
            for path in (
                *("/var", "/mnt", "/mnt/models-of-others", "/mnt/cache/link", "//mnt/models"),
                *("/mnt/models/../../etc", "/mnt/models/..", "/mnt/models/./x", "/mnt//models/x"),
            )
        ),
        *(
            ("model.cache.hostPath", {"model": {**HUB, "cache": {"hostPath": path}}})
            for path in ("/etc", "/mnt/cache/../etc", "/mnt/cache/link", "/mnt/models/x")
        ),
        ("compileCache", {"engine": {"compileCache": {"hostPath": "/root"}}}),
        ("diagnostics", {"prefill": {"engine": {"diagnostics": {"hostPath": "/root"}}}}),
        ("diagnostics", {"decode": {"engine": {"diagnostics": {"hostPath": "/mnt/models"}}}}),
    ],
    ids=str,
)
def test_attacks_are_refused_at_admission(says: str, spec: Object) -> None:
    (message,) = refusals(spec)
    assert says in message


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"prefill": {}, "decode": {"template": {}}},
        template("decode", hostNetwork=False, hostPID=None, volumes=None, containers=None),
        template("decode", containers=container(privileged=False)),
        template("decode", containers=[{"name": "engine", "securityContext": None}]),
        template("decode", volumes=[{"name": "v", "emptyDir": {}}]),
        {"decode": {"template": {"spec": None}}},
        {"decode": {"template": {"metadata": {"labels": {"a": "b"}}}}},
        *(
            {"model": {"uri": uri}}
            for uri in (
                *("pvc://models/x", "file:///mnt/models", "file:///mnt/models/x/"),
                *("file:///mnt/models/x.y/..z", "file:///mnt/cache"),
            )
        ),
        {"model": {**HUB, "cache": {"hostPath": "/mnt/cache"}}},
        {"model": {**HUB, "cache": {"claim": "c"}}},
        {"engine": {"compileCache": {"hostPath": "/mnt/cache"}, "diagnostics": {"claim": "c"}}},
    ],
    ids=str,
)
def test_other_services_are_admitted(spec: Object) -> None:
    assert refusals(spec) == []


@pytest.mark.parametrize("sample", sorted(ROOT.glob("manifests/samples/*.yaml")), ids=str)
def test_the_samples_are_admitted(sample: Path) -> None:
    spec = yaml.safe_load(sample.read_text())["spec"]
    assert refusals(spec, {"hostPaths": ["/models/"]}) == []


def test_without_host_paths_no_folder_of_a_node_is_admitted() -> None:
    for spec in (
        {"model": {"uri": "file:///mnt/models"}},
        {"model": {**HUB, "cache": {"hostPath": "/mnt/cache"}}},
    ):
        assert refusals(spec, {"hostPaths": []})


def test_only_new_services_and_changed_specs_are_checked() -> None:
    (condition,) = policy()["matchConditions"]
    old, new = ({"spec": {"image": image}} for image in "ab")

    def is_checked(operation: str, before: Object | None, after: Object) -> bool:
        names = {"request": {"operation": operation}, "object": after, "oldObject": before}
        return bool(
            evaluate(
                condition["expression"],
                **{name: celpy.json_to_cel(value) for name, value in names.items()},
            )
        )

    assert is_checked("CREATE", None, new)
    assert is_checked("UPDATE", old, new)
    assert not is_checked("UPDATE", {**new, "metadata": {"finalizers": ["x"]}}, new)


def test_the_policy_denies_in_the_watched_namespaces() -> None:
    values = {**VALUES, "watchNamespaces": ["a", "b"], "templates": "restricted"}
    objects = render_on_new_server(values)
    binding = one(objects, "ValidatingAdmissionPolicyBinding")["spec"]
    assert binding["policyName"] == one(objects, "ValidatingAdmissionPolicy")["metadata"]["name"]
    assert binding["validationActions"] == ["Deny"]
    (term,) = binding["matchResources"]["namespaceSelector"]["matchExpressions"]
    assert term == {"key": "kubernetes.io/metadata.name", "operator": "In", "values": ["a", "b"]}
    binding = one(render_on_new_server(VALUES), "ValidatingAdmissionPolicyBinding")["spec"]
    assert "matchResources" not in binding


def test_the_policy_needs_its_value_and_a_restricted_operator() -> None:
    assert render_on_new_server({}) == []
    for values in ({"templates": "unrestricted"}, {"watchNamespaces": ["a"]}):
        with pytest.raises(helm.HelmError, match="needs templates: restricted"):
            render_on_new_server({**VALUES, **values})


def test_the_policy_is_left_out_where_the_api_is_not_served() -> None:
    assert not [kind for kind in kinds(render(VALUES)) if "Policy" in kind and "Valid" in kind]
