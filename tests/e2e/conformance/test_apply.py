"""Server-side apply: ownership, conflicts, force and removal."""


def _map(name, data, **metadata) -> dict[str, object]:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, **metadata},
        "data": data,
    }


def test_apply_creates_and_updates(api, core) -> None:
    path = f"{core}/configmaps/a"
    created = api.apply(path, _map("a", {"x": "1"}), "one")
    assert created.status_code == 201
    again = api.apply(path, _map("a", {"x": "2"}), "one")
    assert again.status_code == 200
    assert again.json()["data"] == {"x": "2"}
    entry = again.json()["metadata"]["managedFields"][0]
    assert (entry["manager"], entry["operation"], entry["fieldsType"]) == (
        "one",
        "Apply",
        "FieldsV1",
    )
    assert entry["fieldsV1"]["f:data"]["f:x"] == {}


def test_apply_needs_a_field_manager(api, core) -> None:
    response = api.patch(f"{core}/configmaps/a", _map("a", {}), "apply-patch+yaml")
    assert response.status_code in (400, 422)
    assert "fieldManager" in response.text


def test_applying_the_same_object_again_changes_nothing(api, core) -> None:
    path = f"{core}/configmaps/a"
    first = api.apply(path, _map("a", {"x": "1"}), "one").json()
    second = api.apply(path, _map("a", {"x": "1"}), "one").json()
    assert second["metadata"]["resourceVersion"] == first["metadata"]["resourceVersion"]


def test_a_field_of_another_manager_conflicts_until_forced(api, core) -> None:
    path = f"{core}/configmaps/a"
    api.apply(path, _map("a", {"x": "1", "y": "1"}), "one")
    refused = api.apply(path, _map("a", {"x": "2"}), "two")
    assert refused.status_code == 409
    status = refused.json()
    assert 'conflict with "one"' in status["message"]
    assert status["details"]["causes"][0]["reason"] == "FieldManagerConflict"
    assert status["details"]["causes"][0]["field"] == ".data.x"
    forced = api.apply(path, _map("a", {"x": "2"}), "two", force="true")
    assert forced.status_code == 200
    assert forced.json()["data"] == {"x": "2", "y": "1"}
    owners = {
        e["manager"]: e["fieldsV1"]["f:data"] for e in forced.json()["metadata"]["managedFields"]
    }
    assert "f:x" not in owners["one"]
    assert "f:x" in owners["two"]


def test_managers_share_an_equal_value_without_a_conflict(api, core) -> None:
    path = f"{core}/configmaps/a"
    api.apply(path, _map("a", {"x": "1"}), "one")
    assert api.apply(path, _map("a", {"x": "1"}), "two").status_code == 200
    dropped = api.apply(path, _map("a", {}), "one")
    assert dropped.json()["data"] == {"x": "1"}, "two still owns it"


def test_fields_no_longer_applied_are_removed(api, core) -> None:
    path = f"{core}/configmaps/a"
    api.apply(path, _map("a", {"x": "1", "y": "1"}, labels={"l": "1"}), "one")
    left = api.apply(path, _map("a", {"y": "1"}), "one").json()
    assert left["data"] == {"y": "1"}
    assert not left["metadata"].get("labels")


def test_an_update_takes_ownership_of_applied_fields(api, core) -> None:
    path = f"{core}/configmaps/a"
    api.apply(path, _map("a", {"x": "1"}), "one")
    api.patch(path, {"data": {"x": "edited"}}, fieldManager="editor")
    refused = api.apply(path, _map("a", {"x": "1"}), "one")
    assert refused.status_code == 409
    assert 'conflict with "editor"' in refused.json()["message"]


def test_lists_of_built_in_kinds_merge_by_key(api, apps, deployment) -> None:
    path = f"{apps}/deployments/web"
    assert api.apply(path, deployment, "one").status_code == 201
    extra = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "web"},
        "spec": {
            "template": {
                "spec": {"containers": [{"name": "main", "env": [{"name": "A", "value": "1"}]}]}
            }
        },
    }
    merged = api.apply(path, extra, "two")
    assert merged.status_code == 200, merged.text
    container = merged.json()["spec"]["template"]["spec"]["containers"][0]
    assert container["image"] == "example/image:1"
    assert container["env"] == [{"name": "A", "value": "1"}]
    extra["spec"]["template"]["spec"]["containers"][0].pop("env")
    removed = api.apply(path, extra, "two").json()["spec"]["template"]["spec"]["containers"][0]
    assert not removed.get("env")
    assert removed["ports"] == [{"containerPort": 80, "protocol": "TCP"}]


def test_an_apply_without_replicas_keeps_the_value_of_another_manager(
    api, apps, deployment
) -> None:
    path = f"{apps}/deployments/web"
    del deployment["spec"]["replicas"]
    deployment["spec"]["paused"] = True
    api.apply(path, deployment, "one")
    assert (
        api.patch(f"{path}/scale", {"spec": {"replicas": 0}}, fieldManager="autoscaler").status_code
        == 200
    )
    deployment["spec"]["minReadySeconds"] = 1
    assert api.apply(path, deployment, "one").json()["spec"]["replicas"] == 0


def test_lists_of_custom_resources_merge_by_their_schema(api, relays) -> None:
    one = relays.body("r", ports=[{"name": "a", "port": 1}], zones=["x"], args=["1"])
    two = {**relays.body("r"), "spec": {"ports": [{"name": "b", "port": 2}], "zones": ["y"]}}
    api.apply(relays.at("r"), one, "one")
    spec = api.apply(relays.at("r"), two, "two").json()["spec"]
    assert spec["ports"] == [{"name": "a", "port": 1}, {"name": "b", "port": 2}]
    assert spec["zones"] == ["x", "y"]
    assert spec["args"] == ["1"]
    one["spec"].pop("ports")
    assert api.apply(relays.at("r"), one, "one").json()["spec"]["ports"] == [
        {"name": "b", "port": 2}
    ]
    refused = api.apply(relays.at("r"), {**two, "spec": {**two["spec"], "args": ["2"]}}, "two")
    assert refused.status_code == 409
    assert refused.json()["details"]["causes"][0]["field"] == ".spec.args"


def test_status_is_applied_through_its_own_endpoint(api, relays) -> None:
    api.apply(relays.at("r"), relays.body("r"), "operator")
    ready = {"type": "Ready", "status": "False", "reason": "Starting", "message": "m"}
    status = {**relays.body("r"), "status": {"conditions": [ready]}}
    del status["spec"]
    applied = api.apply(relays.at("r", "status"), status, "operator")
    assert applied.status_code == 200, applied.text
    status["status"]["conditions"] = [{**ready, "status": "True"}]
    changed = api.apply(relays.at("r", "status"), status, "operator").json()
    assert [c["status"] for c in changed["status"]["conditions"]] == ["True"]
    assert changed["spec"]["model"] == {"uri": "file:///models/x", "dtype": "auto"}
