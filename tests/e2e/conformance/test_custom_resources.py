"""Custom resources: schema validation, defaulting, pruning, scale and printer columns."""

import pytest

from support.waiting import eventually


def test_defaults_are_filled_in(api, relays) -> None:
    spec = api.post(relays.path, relays.body("d", prefill={})).json()["spec"]
    assert spec["model"]["dtype"] == "auto"
    assert spec["decode"] == {"replicas": 1, "parallelism": {"tensor": 1}}
    assert spec["prefill"] == {"replicas": 1, "parallelism": {"tensor": 1}}


def test_unknown_fields_are_pruned_where_the_schema_is_closed(api, relays) -> None:
    body = relays.body("p", unknown=1, template={"spec": {"anything": [1]}})
    spec = api.post(relays.path, body).json()["spec"]
    assert "unknown" not in spec
    assert spec["template"] == {"spec": {"anything": [1]}}


@pytest.mark.parametrize(
    ("spec", "field", "says"),
    [
        (
            {"decode": {"replicas": -1}},
            "spec.decode.replicas",
            "should be greater than or equal to 0",
        ),
        ({"decode": {"replicas": "two"}}, "spec.decode.replicas", "must be of type integer"),
        ({"model": {"uri": "no-scheme"}}, "spec.model.uri", "should match '^[a-z]+://'"),
        ({"model": {"uri": "file://x", "dtype": "int4"}}, "spec.model.dtype", "Unsupported value"),
        ({"model": {}}, "spec.model.uri", "Required value"),
        ({"zones": ["a", "a"]}, "spec.zones[1]", "Duplicate value"),
        ({"ports": [{"name": "a"}, {"name": "a"}]}, "spec.ports[1]", "Duplicate value"),
        ({"args": "not a list"}, "spec.args", "must be of type array"),
    ],
)
def test_invalid_values_are_refused_with_the_fields_name(api, relays, spec, field, says) -> None:
    response = api.post(relays.path, relays.body("bad", **spec))
    status = response.json()
    assert response.status_code == 422, status
    assert status["reason"] == "Invalid"
    causes = {cause["field"]: cause["message"] for cause in status["details"]["causes"]}
    assert field in causes
    assert says in causes[field]
    assert status["message"].startswith('Relay.conformance.baton.dev "bad" is invalid: ')


def test_the_status_is_validated(api, relays) -> None:
    api.post(relays.path, relays.body("s"))
    response = api.patch(relays.at("s", "status"), {"status": {"replicas": "many"}})
    assert response.status_code == 422
    assert "status.replicas" in response.json()["message"]


def test_an_update_requires_the_resource_version(api, relays) -> None:
    """Updates of built-in kinds such as ConfigMap may omit it."""
    live = api.post(relays.path, relays.body("v")).json()
    for part in ("", "status"):
        response = api.put(relays.at("v", part) if part else relays.at("v"), relays.body("v"))
        assert response.status_code == 422, response.json()
        assert response.json()["details"]["causes"][0]["field"] == "metadata.resourceVersion"
    assert api.put(relays.at("v"), live).status_code == 200


def test_a_wrong_kind_or_version_is_refused(api, relays) -> None:
    kind = api.post(relays.path, {**relays.body("x"), "kind": "Other"})
    assert kind.status_code == 422
    assert kind.json()["details"]["causes"][0]["field"] == "kind"
    assert api.post(relays.path, {**relays.body("x"), "apiVersion": "other/v1"}).status_code == 400


def test_rules_in_the_schema_are_evaluated(api, relay_crd, define, namespace) -> None:
    if api.minor < 25:
        pytest.skip(f"Kubernetes 1.{api.minor} has no CEL rules")
    definition = relay_crd("rules.baton.dev")
    spec = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    spec["properties"]["prefill"].pop("default", None)
    spec["x-kubernetes-validations"] = [
        {
            "rule": "!has(self.prefill) || self.prefill.replicas <= self.decode.replicas",
            "message": "more prefill than decode",
        },
        {"rule": "self.model.uri == oldSelf.model.uri", "message": "the model is immutable"},
    ]
    define(definition)
    path = f"/apis/rules.baton.dev/v1alpha1/namespaces/{namespace}/relays"
    body = {
        "apiVersion": "rules.baton.dev/v1alpha1",
        "kind": "Relay",
        "metadata": {"name": "r"},
        "spec": {"model": {"uri": "file://a"}, "prefill": {"replicas": 2}},
    }
    refused = api.post(path, body)
    assert refused.status_code == 422
    assert refused.json()["details"]["causes"][0]["field"] == "spec"
    assert "more prefill than decode" in refused.json()["message"]
    body["spec"]["prefill"]["replicas"] = 1
    assert api.post(path, body).status_code == 201
    changed = api.patch(f"{path}/r", {"spec": {"model": {"uri": "file://b"}}})
    assert changed.status_code == 422
    assert "the model is immutable" in changed.json()["message"]


def test_the_scale_subresource_reads_and_writes_replicas(api, relays) -> None:
    api.post(relays.path, relays.body("s", decode={"replicas": 2}))
    api.patch(relays.at("s", "status"), {"status": {"replicas": 1, "selector": "role=decode"}})
    scale = api.get(relays.at("s", "scale")).json()
    assert (scale["kind"], scale["apiVersion"]) == ("Scale", "autoscaling/v1")
    assert scale["spec"] == {"replicas": 2}
    assert scale["status"] == {"replicas": 1, "selector": "role=decode"}
    scale["spec"]["replicas"] = 3
    assert api.put(relays.at("s", "scale"), scale).json()["spec"] == {"replicas": 3}
    assert api.put(relays.at("s", "scale"), {**scale, "spec": {"replicas": 4}}).status_code == 409
    assert api.patch(relays.at("s", "scale"), {"spec": {"replicas": 5}}).status_code == 200
    stored = api.get(relays.at("s")).json()
    assert stored["spec"]["decode"]["replicas"] == 5
    assert stored["metadata"]["generation"] == 3


def test_negative_replicas_are_refused_through_scale(api, relays) -> None:
    api.post(relays.path, relays.body("s"))
    assert api.patch(relays.at("s", "scale"), {"spec": {"replicas": -1}}).status_code == 422


def test_tables_show_the_printer_columns(api, relays) -> None:
    api.post(relays.path, relays.body("t", decode={"replicas": 2}))
    condition = {"type": "Ready", "status": "True", "reason": "r", "message": "m"}
    api.patch(relays.at("t", "status"), {"status": {"conditions": [condition]}})
    headers = {"Accept": "application/json;as=Table;v=v1;g=meta.k8s.io"}
    table = api.http.get(api.server + relays.path, headers=headers, timeout=10).json()
    assert table["kind"] == "Table"
    columns = [(c["name"], c["priority"]) for c in table["columnDefinitions"]]
    assert columns == [("Name", 0), ("Ready", 0), ("Decode", 0), ("Model", 1), ("Age", 0)]
    row = table["rows"][0]
    assert row["cells"][:4] == ["t", "True", 2, "file:///models/x"]
    assert row["cells"][4].endswith("s")
    assert row["object"]["kind"] == "PartialObjectMetadata"
    assert row["object"]["metadata"]["name"] == "t"


def test_deleting_a_definition_deletes_its_objects(api, relay_crd, define, namespace) -> None:
    definition = relay_crd("gone.baton.dev")
    define(definition)
    path = f"/apis/gone.baton.dev/v1alpha1/namespaces/{namespace}/relays"
    body = {
        "apiVersion": "gone.baton.dev/v1alpha1",
        "kind": "Relay",
        "metadata": {"name": "x"},
        "spec": {"model": {"uri": "a://b"}},
    }
    assert api.post(path, body).status_code == 201
    crd = (
        f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{definition['metadata']['name']}"
    )
    api.delete(crd)
    eventually(lambda: api.get(crd).status_code == 404, "the definition gone")
    eventually(lambda: api.get(path).status_code == 404, "the path gone")


def test_a_definition_must_be_structural_and_well_named(api, relay_crd) -> None:
    crds = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    misnamed = relay_crd("bad.baton.dev")
    misnamed["metadata"]["name"] = "other.bad.baton.dev"
    assert api.post(crds, misnamed).status_code == 422
    shapeless = relay_crd("bad.baton.dev")
    del shapeless["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"][
        "properties"
    ]["model"]["type"]
    response = api.post(crds, shapeless)
    assert response.status_code == 422
    assert "properties[model].type" in response.text


def test_discovery_lists_the_custom_resource(api, relays) -> None:
    resources = {r["name"]: r for r in api.get(f"/apis/{relays.api_version}").json()["resources"]}
    assert resources["relays"]["shortNames"] == ["rly"]
    assert resources["relays/scale"]["kind"] == "Scale"
    assert "relays/status" in resources
