"""The LLMService definition: errors of kubectl and the API server for invalid services."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from baton_operator.api.crd import custom_resource_definition
from baton_operator.names import API_VERSION, GROUP, KIND, PLURAL
from support.waiting import eventually

MODEL = {"model": {"uri": "file:///m"}}


@pytest.fixture
def services(api, define: Callable[[Any], None], namespace: str) -> Iterator[str]:
    """Return the path of the namespace's LLMServices."""
    path = f"/apis/{API_VERSION}/namespaces/{namespace}/{PLURAL}"
    stored = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{PLURAL}.{GROUP}"
    eventually(lambda: api.get(stored).status_code == 404, "the definition of the test before gone")
    define(custom_resource_definition(rules=api.minor >= 25))
    yield path
    api.delete(path)
    eventually(lambda: not api.get(path).json().get("items"), "the services gone")


def service(**spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": "demo"},
        "spec": {**MODEL, **spec},
    }


@pytest.mark.parametrize("how", [["create"], ["apply"], ["apply", "--server-side"]])
def test_kubectl_names_a_misspelled_field(api, services, namespace, how) -> None:
    document = service(decoder={"replicas": 1}, gateway={"apiKey": {"secretName": "s"}})

    # Older servers publish the schema that kubectl validates against after a short delay.
    def refused() -> bool:
        done = api.kubectl(*how, "-n", namespace, "-f", "-", stdin=document)
        if done.returncode == 0:
            api.delete(f"{services}/demo")
            return False
        return "decoder" in done.stderr and "apiKey" in done.stderr

    eventually(refused, "both fields named")
    assert api.get(f"{services}/demo").status_code == 404


def test_without_strict_validation_an_unknown_field_is_dropped(api, services) -> None:
    """The operator cannot warn of the field, because the server does not store it."""
    stored = api.post(services, service(decoder={"replicas": 1})).json()
    assert "decoder" not in stored["spec"]


def test_specs_that_break_a_rule_are_refused_from_kubernetes_1_25_on(api, services) -> None:
    answer = api.post(services, service(gateway={"limits": {"maxConcurrentPerKey": 2}}))
    if api.minor < 25:
        assert answer.status_code == 201, "the operator says InvalidSpec"
        return
    assert answer.status_code == 422
    [cause] = answer.json()["details"]["causes"]
    assert cause["field"] == "spec.gateway"
    assert "limits.maxConcurrentPerKey needs apiKeys" in cause["message"]
    created = api.post(services, service(gateway={"ingress": {"host": "a.example"}}))
    assert created.status_code == 201
    route = {"spec": {"gateway": {"httpRoute": {"parentRefs": [{"name": "g"}]}}}}
    assert (
        "ingress and httpRoute exclude each other"
        in api.patch(f"{services}/demo", route).json()["message"]
    )


def test_lists_and_names_are_bounded(api, services) -> None:
    for spec, field in (
        ({"gateway": {"httpRoute": {"parentRefs": []}}}, "spec.gateway.httpRoute.parentRefs"),
        ({"gateway": {"tls": {"secretName": "Not A Name"}}}, "spec.gateway.tls.secretName"),
        ({"gateway": {"tls": {}}}, "spec.gateway.tls.secretName"),
        ({"gateway": {"generationConfig": "some"}}, "spec.gateway.generationConfig"),
        ({"decode": {"parallelism": {"pipeline": 65}}}, "spec.decode.parallelism.pipeline"),
    ):
        answer = api.post(services, service(**spec))
        assert answer.status_code == 422, spec
        assert field in [cause["field"] for cause in answer.json()["details"]["causes"]]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("0demo", [r"metadata.name in body should match '^[a-z]([-a-z0-9]*[a-z0-9])?$'"]),
        ("a.b", [r"metadata.name in body should match '^[a-z]([-a-z0-9]*[a-z0-9])?$'"]),
        # "should be at most 40 chars long", later "Too long: may not be longer than 40".
        (
            "d" * 41,
            ["40"],
        ),
        ("Demo", ["a lowercase RFC 1123 subdomain must", "metadata.name in body should match"]),
    ],
)
def test_a_service_name_from_which_no_pod_name_can_be_made_is_refused(
    api, services, name, says
) -> None:
    answer = api.post(services, {**service(), "metadata": {"name": name}})
    assert answer.status_code == 422, answer.text
    causes = answer.json()["details"]["causes"]
    assert {cause["field"] for cause in causes} == {"metadata.name"}
    for text in says:
        assert any(text in cause["message"] for cause in causes), causes
    assert api.get(f"{services}/{name}").status_code == 404


def test_a_generated_name_is_validated_with_its_suffix(api, services) -> None:
    made = api.post(services, {**service(), "metadata": {"generateName": "demo-"}})
    assert made.status_code == 201, made.text
    answer = api.post(services, {**service(), "metadata": {"generateName": "d" * 40}})
    assert answer.status_code == 422, answer.text
    assert [cause["field"] for cause in answer.json()["details"]["causes"]] == ["metadata.name"]
