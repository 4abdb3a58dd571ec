"""kubectl, unmodified and with its default validation."""

import json


def _run(api, *arguments, stdin=None) -> str:
    done = api.kubectl(*arguments, stdin=stdin)
    assert done.returncode == 0, f"kubectl {' '.join(arguments)}: {done.stdout}{done.stderr}"
    return done.stdout


def test_apply_get_patch_scale_wait_describe_delete_of_a_custom_resource(
    api, relays, namespace
) -> None:
    body = relays.body("demo", decode={"replicas": 2})
    assert "created" in _run(api, "apply", "-n", namespace, "-f", "-", stdin=body)
    assert "unchanged" in _run(api, "apply", "-n", namespace, "-f", "-", stdin=body)
    body["spec"]["args"] = ["a"]
    assert "configured" in _run(api, "apply", "-n", namespace, "-f", "-", stdin=body)
    assert json.loads(_run(api, "get", "-n", namespace, "rly/demo", "-o", "json"))["spec"][
        "args"
    ] == ["a"]
    assert _run(api, "get", "-n", namespace, "relays").split()[:4] == [
        "NAME",
        "READY",
        "DECODE",
        "AGE",
    ]
    _run(
        api, "patch", "-n", namespace, "relay/demo", "--type=merge", "-p", '{"spec":{"args":["b"]}}'
    )
    _run(api, "scale", "-n", namespace, "relay/demo", "--replicas=3")
    ready = {"type": "Ready", "status": "True", "reason": "r", "message": "m"}
    api.patch(relays.at("demo", "status"), {"status": {"conditions": [ready]}})
    assert "condition met" in _run(
        api, "wait", "-n", namespace, "relay/demo", "--for=condition=Ready", "--timeout=10s"
    )
    described = _run(api, "describe", "-n", namespace, "relay/demo")
    assert "Replicas:  3" in described
    assert "deleted" in _run(
        api, "delete", "-n", namespace, "relay/demo", "--wait", "--timeout=20s"
    )
    assert api.get(relays.at("demo")).status_code == 404


def test_a_list_is_applied(api, namespace) -> None:
    items = [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}} for name in "ab"]
    body = {"apiVersion": "v1", "kind": "List", "items": items}
    shown = _run(api, "apply", "-n", namespace, "-f", "-", stdin=body)
    assert shown.split() == ["configmap/a", "created", "configmap/b", "created"]


def test_server_side_apply_and_its_conflicts(api, relays, namespace) -> None:
    body = relays.body("demo", args=["a"])
    _run(
        api, "apply", "-n", namespace, "--server-side", "--field-manager=one", "-f", "-", stdin=body
    )
    body["spec"]["args"] = ["b"]
    refused = api.kubectl(
        "apply", "-n", namespace, "--server-side", "--field-manager=two", "-f", "-", stdin=body
    )
    assert refused.returncode != 0
    assert 'conflict with "one"' in refused.stderr
    arguments = ("--server-side", "--field-manager=two", "--force-conflicts", "-f", "-")
    _run(api, "apply", "-n", namespace, *arguments, stdin=body)


def test_client_side_apply_removes_fields_that_the_file_no_longer_has(
    api, apps, deployment, namespace
) -> None:
    container = deployment["spec"]["template"]["spec"]["containers"][0]
    container["env"] = [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}]
    _run(api, "apply", "-n", namespace, "-f", "-", stdin=deployment)
    container["env"] = [{"name": "B", "value": "3"}]
    _run(api, "apply", "-n", namespace, "-f", "-", stdin=deployment)
    stored = api.get(f"{apps}/deployments/web").json()["spec"]["template"]["spec"]["containers"][0]
    assert stored["env"] == [{"name": "B", "value": "3"}]
    assert _run(api, "get", "-n", namespace, "deploy").split()[:5] == [
        "NAME",
        "READY",
        "UP-TO-DATE",
        "AVAILABLE",
        "AGE",
    ]
    assert "0 desired" in _run(api, "describe", "-n", namespace, "deploy/web")
    _run(api, "scale", "-n", namespace, "deploy/web", "--replicas=0")
    _run(api, "delete", "-n", namespace, "deploy/web", "--timeout=30s")


def test_pods_are_shown_described_and_deleted(api, core, namespace) -> None:
    pod = {
        "metadata": {"name": "p"},
        "spec": {"nodeName": "nowhere", "containers": [{"name": "c", "image": "i"}]},
    }
    api.post(f"{core}/pods", pod)
    lines = _run(api, "get", "-n", namespace, "pods").splitlines()
    assert lines[0].split()[:5] == ["NAME", "READY", "STATUS", "RESTARTS", "AGE"]
    assert lines[1].split()[:4] == ["p", "0/1", "Pending", "0"]
    assert "nowhere" in _run(api, "describe", "-n", namespace, "pod/p")
    _run(api, "delete", "-n", namespace, "pod/p", "--grace-period=0", "--force")
    assert api.get(f"{core}/pods/p").status_code == 404


def test_events_are_shown_with_their_object(api, core, namespace) -> None:
    created = api.post(f"{core}/configmaps", {"metadata": {"name": "subject"}}).json()
    event = {
        "metadata": {"name": "subject.1"},
        "involvedObject": {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "name": "subject",
            "namespace": namespace,
            "uid": created["metadata"]["uid"],
        },
        "reason": "Happened",
        "message": "something happened",
        "type": "Normal",
    }
    assert api.post(f"{core}/events", event).status_code == 201
    assert "something happened" in _run(
        api, "get", "-n", namespace, "events", "--field-selector=involvedObject.name=subject"
    )
    assert "something happened" in _run(api, "describe", "-n", namespace, "configmap/subject")
    modern = api.get(f"/apis/events.k8s.io/v1/namespaces/{namespace}/events/subject.1").json()
    assert (modern["note"], modern["regarding"]["name"]) == ("something happened", "subject")
