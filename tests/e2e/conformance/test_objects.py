"""Creating, reading, updating and patching objects."""

import pytest


def test_a_created_object_gets_its_identity_from_the_server(api, core) -> None:
    response = api.post(
        f"{core}/configmaps", {"metadata": {"generateName": "x-"}, "data": {"a": "1"}}
    )
    metadata = response.json()["metadata"]
    assert response.status_code == 201
    assert metadata["name"].startswith("x-")
    assert len(metadata["name"]) == 7
    assert metadata["uid"]
    assert metadata["creationTimestamp"].endswith("Z")
    assert int(metadata["resourceVersion"]) > 0


def test_creating_a_name_twice_is_already_exists(api, core) -> None:
    body = {"metadata": {"name": "twice"}}
    assert api.post(f"{core}/configmaps", body).status_code == 201
    again = api.post(f"{core}/configmaps", body)
    assert again.status_code == 409
    assert again.json()["reason"] == "AlreadyExists"
    assert again.json()["details"]["kind"] == "configmaps"


def test_a_missing_object_is_not_found_with_details(api, core) -> None:
    response = api.get(f"{core}/pods/nobody")
    assert response.status_code == 404
    status = response.json()
    assert (status["kind"], status["status"], status["reason"]) == ("Status", "Failure", "NotFound")
    assert status["message"] == 'pods "nobody" not found'
    assert status["details"] == {"name": "nobody", "kind": "pods"}


def test_an_object_in_a_missing_namespace_is_refused(api) -> None:
    response = api.post("/api/v1/namespaces/nowhere/configmaps", {"metadata": {"name": "x"}})
    assert response.status_code == 404
    assert response.json()["message"] == 'namespaces "nowhere" not found'


def test_an_unknown_path_is_not_found(api) -> None:
    assert api.get("/apis/nobody.example.com/v1/things").status_code == 404


def test_a_request_without_a_token_is_refused(api) -> None:
    assert api.as_bearer("wrong", "/api/v1/pods").status_code == 401


def test_a_stale_resource_version_conflicts(api, core) -> None:
    first = api.post(f"{core}/configmaps", {"metadata": {"name": "c"}, "data": {"a": "1"}}).json()
    path = f"{core}/configmaps/c"
    assert api.put(path, {**first, "data": {"a": "2"}}).status_code == 200
    stale = api.put(path, {**first, "data": {"a": "3"}})
    assert stale.status_code == 409
    assert stale.json()["reason"] == "Conflict"
    assert "the object has been modified" in stale.json()["message"]
    assert api.get(path).json()["data"] == {"a": "2"}


def test_a_patch_may_carry_a_resource_version(api, core) -> None:
    first = api.post(f"{core}/configmaps", {"metadata": {"name": "c"}}).json()
    version = first["metadata"]["resourceVersion"]
    body = {"metadata": {"resourceVersion": version}, "data": {"a": "1"}}
    assert api.patch(f"{core}/configmaps/c", body).status_code == 200
    assert api.patch(f"{core}/configmaps/c", {**body, "data": {"a": "2"}}).status_code == 409


def test_an_update_that_changes_nothing_keeps_the_resource_version(api, core) -> None:
    first = api.post(f"{core}/configmaps", {"metadata": {"name": "c"}, "data": {"a": "1"}}).json()
    again = api.put(f"{core}/configmaps/c", first).json()
    assert again["metadata"]["resourceVersion"] == first["metadata"]["resourceVersion"]


def test_generation_counts_changes_of_the_spec_only(api, relays) -> None:
    created = api.post(relays.path, relays.body("g")).json()
    assert created["metadata"]["generation"] == 1
    labelled = api.patch(relays.at("g"), {"metadata": {"labels": {"a": "b"}}}).json()
    assert labelled["metadata"]["generation"] == 1
    reported = api.patch(relays.at("g", "status"), {"status": {"replicas": 2}}).json()
    assert reported["metadata"]["generation"] == 1
    scaled = api.patch(relays.at("g"), {"spec": {"decode": {"replicas": 4}}}).json()
    assert scaled["metadata"]["generation"] == 2


def test_generation_of_a_deployment_also_counts_changes_of_annotations(
    api, apps, deployment
) -> None:
    deployment["spec"]["paused"] = True  # so that the controller does not change it
    api.post(f"{apps}/deployments", deployment)
    path = f"{apps}/deployments/web"
    assert (
        api.patch(path, {"metadata": {"labels": {"a": "b"}}}).json()["metadata"]["generation"] == 1
    )
    assert api.patch(path, {"spec": {"minReadySeconds": 3}}).json()["metadata"]["generation"] == 2
    assert (
        api.patch(path, {"metadata": {"annotations": {"a": "b"}}}).json()["metadata"]["generation"]
        == 3
    )


def test_status_and_spec_are_written_through_their_own_endpoints(api, relays) -> None:
    created = api.post(relays.path, {**relays.body("s"), "status": {"replicas": 7}}).json()
    assert "status" not in created
    reported = api.patch(
        relays.at("s", "status"), {"spec": {"args": ["x"]}, "status": {"replicas": 3}}
    ).json()
    assert reported["status"] == {"replicas": 3}
    assert "args" not in reported["spec"]
    written = api.put(
        relays.at("s"),
        {**reported, "spec": {**reported["spec"], "args": ["y"]}, "status": {"replicas": 9}},
    ).json()
    assert written["status"] == {"replicas": 3}
    assert written["spec"]["args"] == ["y"]


def test_json_patch(api, core) -> None:
    api.post(f"{core}/configmaps", {"metadata": {"name": "p"}, "data": {"a": "1"}})
    operations = [
        {"op": "test", "path": "/data/a", "value": "1"},
        {"op": "add", "path": "/data/b", "value": "2"},
    ]
    assert api.patch(f"{core}/configmaps/p", operations, "json-patch+json").json()["data"] == {
        "a": "1",
        "b": "2",
    }
    wrong = [{"op": "test", "path": "/data/a", "value": "other"}]
    assert api.patch(f"{core}/configmaps/p", wrong, "json-patch+json").status_code == 422


def test_merge_patch_replaces_lists_and_removes_nulls(api, relays) -> None:
    api.post(relays.path, relays.body("m", args=["a", "b"], zones=["z"]))
    patched = api.patch(relays.at("m"), {"spec": {"args": ["c"], "zones": None}}).json()
    assert patched["spec"]["args"] == ["c"]
    assert "zones" not in patched["spec"]


def test_strategic_merge_patch_merges_lists_by_key(api, apps, deployment) -> None:
    api.post(f"{apps}/deployments", deployment)
    sidecar = {"name": "sidecar", "image": "example/sidecar:1"}
    change = {"name": "main", "env": [{"name": "A", "value": "1"}]}
    path = f"{apps}/deployments/web"
    body = {"spec": {"template": {"spec": {"containers": [sidecar, change]}}}}
    assert api.patch(path, body, "strategic-merge-patch+json").status_code == 200
    containers = {
        c["name"]: c for c in api.get(path).json()["spec"]["template"]["spec"]["containers"]
    }
    assert set(containers) == {"main", "sidecar"}
    assert containers["main"]["image"] == "example/image:1"
    assert containers["main"]["env"] == [{"name": "A", "value": "1"}]
    removal = {
        "spec": {"template": {"spec": {"containers": [{"name": "sidecar", "$patch": "delete"}]}}}
    }
    left = api.patch(path, removal, "strategic-merge-patch+json").json()["spec"]["template"][
        "spec"
    ]["containers"]
    assert [c["name"] for c in left] == ["main"]


def test_custom_resources_take_no_strategic_merge_patch(api, relays) -> None:
    api.post(relays.path, relays.body("x"))
    response = api.patch(relays.at("x"), {"spec": {}}, "strategic-merge-patch+json")
    assert response.status_code == 415
    assert response.json()["reason"] == "UnsupportedMediaType"


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
def test_bodies_of_an_unknown_media_type_are_refused(api, core, method) -> None:
    api.post(f"{core}/configmaps", {"metadata": {"name": "x"}})
    path = f"{core}/configmaps" if method == "POST" else f"{core}/configmaps/x"
    response = api.request(method, path, {"metadata": {"name": "x"}}, "text/plain")
    assert response.status_code == 415
    assert response.json()["reason"] == "UnsupportedMediaType"
    if method != "PATCH":  # kube-apiserver refuses patches before it selects a decoder
        assert response.json()["message"].startswith(
            "the body of the request was in an unknown format - accepted media types include: "
            "application/json, application/yaml"
        )


def test_a_dry_run_changes_nothing(api, core) -> None:
    response = api.post(f"{core}/configmaps", {"metadata": {"name": "dry"}}, dryRun="All")
    assert response.status_code == 201
    assert api.get(f"{core}/configmaps/dry").status_code == 404


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        ("tier=a", {"one", "two"}),
        ("tier!=a", {"three", "four"}),
        ("tier in (a,b)", {"one", "two", "three"}),
        ("tier notin (a)", {"three", "four"}),
        ("tier", {"one", "two", "three"}),
        ("!tier", {"four"}),
        ("tier=a,size=big", {"two"}),
    ],
)
def test_label_selectors(api, core, selector, expected) -> None:
    for name, labels in (
        ("one", {"tier": "a"}),
        ("two", {"tier": "a", "size": "big"}),
        ("three", {"tier": "b"}),
        ("four", {"case": "labels"}),
    ):
        api.post(
            f"{core}/secrets", {"metadata": {"name": name, "labels": {"mine": "yes", **labels}}}
        )
    found = api.get(f"{core}/secrets", labelSelector=f"mine=yes,{selector}").json()["items"]
    assert {item["metadata"]["name"] for item in found} == expected


def test_field_selectors(api, core) -> None:
    for name in ("one", "two"):
        api.post(f"{core}/configmaps", {"metadata": {"name": name}})
    found = api.get(f"{core}/configmaps", fieldSelector="metadata.name=two").json()["items"]
    assert [item["metadata"]["name"] for item in found] == ["two"]
    assert api.get(f"{core}/configmaps", fieldSelector="data.a=1").status_code == 400


def test_lists_come_in_pages(api, core) -> None:
    for index in range(5):
        api.post(
            f"{core}/configmaps",
            {"metadata": {"name": f"page-{index}", "labels": {"paged": "yes"}}},
        )
    names, token = [], ""
    for _ in range(6):
        page = api.get(
            f"{core}/configmaps",
            limit="2",
            labelSelector="paged=yes",
            **({"continue": token} if token else {}),
        ).json()
        names += [item["metadata"]["name"] for item in page["items"]]
        token = page["metadata"].get("continue", "")
        if not token:
            break
    assert names == [f"page-{index}" for index in range(5)]


def test_services_get_and_keep_a_cluster_address(api, core) -> None:
    service = {
        "metadata": {"name": "svc"},
        "spec": {"ports": [{"port": 80}], "selector": {"a": "b"}},
    }
    spec = api.post(f"{core}/services", service).json()["spec"]
    assert spec["clusterIP"].count(".") == 3
    assert spec["type"] == "ClusterIP"
    assert spec["ports"] == [{"port": 80, "protocol": "TCP", "targetPort": 80}]
    patched = api.patch(f"{core}/services/svc", {"spec": {"selector": {"a": "c"}}}).json()["spec"]
    assert patched["clusterIP"] == spec["clusterIP"]
    headless = {
        "metadata": {"name": "headless"},
        "spec": {"clusterIP": "None", "ports": [{"port": 80}]},
    }
    assert api.post(f"{core}/services", headless).json()["spec"]["clusterIP"] == "None"


def test_pods_get_the_defaults_that_clients_rely_on(api, core) -> None:
    pod = {
        "metadata": {"name": "p"},
        "spec": {"containers": [{"name": "c", "image": "example/i:1"}], "nodeName": "nowhere"},
    }
    created = api.post(f"{core}/pods", pod).json()
    spec = created["spec"]
    assert (spec["restartPolicy"], spec["terminationGracePeriodSeconds"], spec["dnsPolicy"]) == (
        "Always",
        30,
        "ClusterFirst",
    )
    assert spec["serviceAccountName"] == "default"
    container = spec["containers"][0]
    assert container["imagePullPolicy"] == "IfNotPresent"
    assert container["terminationMessagePolicy"] == "File"
    assert (created["status"]["phase"], created["status"]["qosClass"]) == ("Pending", "BestEffort")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"metadata": {"name": "Not_A_Name"}}, "metadata.name"),
        ({"spec": {"containers": []}}, "spec.containers"),
        ({"spec": {"containers": [{"name": "c"}]}}, "spec.containers[0].image"),
        (
            {
                "spec": {
                    "containers": [
                        {
                            "name": "c",
                            "image": "i",
                            "volumeMounts": [{"name": "v", "mountPath": "/v"}],
                        }
                    ]
                }
            },
            "spec.containers[0].volumeMounts[0].name",
        ),
    ],
)
def test_invalid_pods_are_refused_with_the_fields_name(api, core, change, field) -> None:
    pod = {
        "metadata": {"name": "p"},
        "spec": {"containers": [{"name": "c", "image": "i"}]},
        **change,
    }
    response = api.post(f"{core}/pods", pod)
    assert response.status_code == 422, response.text
    assert field in {cause["field"] for cause in response.json()["details"]["causes"]}


def test_a_deployment_selector_must_match_and_never_changes(api, apps, deployment) -> None:
    wrong = {
        **deployment,
        "spec": {**deployment["spec"], "selector": {"matchLabels": {"app": "other"}}},
    }
    refused = api.post(f"{apps}/deployments", wrong)
    assert refused.status_code == 422
    assert refused.json()["details"]["causes"][0]["field"] == "spec.template.metadata.labels"
    created = api.post(f"{apps}/deployments", deployment).json()
    assert created["spec"]["strategy"]["type"] == "RollingUpdate"
    assert created["spec"]["progressDeadlineSeconds"] == 600


def test_mistyped_fields_are_a_bad_request(api, apps, deployment) -> None:
    deployment["spec"]["replicas"] = "three"
    assert api.post(f"{apps}/deployments", deployment).status_code == 400


def test_a_service_account_token_is_accepted(api, core) -> None:
    api.post(f"{core}/serviceaccounts", {"metadata": {"name": "robot"}})
    body = {
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenRequest",
        "spec": {"expirationSeconds": 600},
    }
    response = api.post(f"{core}/serviceaccounts/robot/token", body)
    assert response.status_code == 201, response.text
    assert api.as_bearer(response.json()["status"]["token"], "/api").status_code == 200


def test_pod_binding_assigns_a_node_once(api, core) -> None:
    pod = {
        "metadata": {"name": "p"},
        "spec": {"schedulerName": "nobody", "containers": [{"name": "c", "image": "i"}]},
    }
    assert api.post(f"{core}/pods", pod).status_code == 201
    binding = {
        "apiVersion": "v1",
        "kind": "Binding",
        "metadata": {"name": "p"},
        "target": {"kind": "Node", "name": "here"},
    }
    assert api.post(f"{core}/pods/p/binding", binding).status_code == 201
    bound = api.get(f"{core}/pods/p").json()
    assert bound["spec"]["nodeName"] == "here"
    assert [c["status"] for c in bound["status"]["conditions"] if c["type"] == "PodScheduled"] == [
        "True"
    ]
    assert api.post(f"{core}/pods/p/binding", binding).status_code == 409
