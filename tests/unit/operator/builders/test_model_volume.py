"""Volumes and fetchers for each kind of model URI."""

from __future__ import annotations

import re
from typing import Any

import pytest

from baton_kube.client import Object
from baton_operator.api.spec_model import MODEL_URI, Model, ModelCache
from baton_operator.builders import config_maps, model_volume
from baton_operator.builders.gateway import gateway_deployment
from baton_operator.builders.member_pods import MemberTemplate
from baton_protocol.options.config import EngineConfig, GatewayConfig
from pocketkube.containers.environment import command_line
from support.operator.services import resolved

HUB = {"uri": "hf://org/some.model@v1.0"}
GIB = 2**30


def member_spec(**fields: Any) -> Object:
    spec: Object = MemberTemplate(
        resolved(model=fields, decode={"resources": RESOURCES}), "decode"
    ).pod(0)["spec"]
    return spec


RESOURCES = {"limits": {"cpu": "4", "memory": "8Gi", "nvidia.com/gpu": "1"}}


def fetcher_of(spec: Object) -> Object:
    (container,) = spec["initContainers"]
    return container


def volume_of(spec: Object) -> Object:
    (found,) = [dict(volume) for volume in spec["volumes"] if volume.pop("name") == "model"]
    return found


@pytest.mark.parametrize(
    ("uri", "path", "source"),
    [
        ("file:///models/x/", "/models/x", {"hostPath": {"path": "/models/x"}}),
        (
            "pvc://c/x",
            "/models/c/x",
            {"persistentVolumeClaim": {"claimName": "c", "readOnly": True}},
        ),
        (
            "image://reg.io/a/b:v1",
            "/models/image",
            {"image": {"reference": "reg.io/a/b:v1", "pullPolicy": "IfNotPresent"}},
        ),
        (
            f"image://host:5000/a@sha256:{'0' * 64}/weights/x",
            "/models/image/weights/x",
            {
                "image": {
                    "reference": f"host:5000/a@sha256:{'0' * 64}",
                    "pullPolicy": "IfNotPresent",
                }
            },
        ),
    ],
)
def test_local_models_are_mounted_and_not_fetched(uri: str, path: str, source: Object) -> None:
    assert re.fullmatch(MODEL_URI, uri)
    found = model_volume.source(Model(uri=uri), "decode", "default")
    assert found.path == path
    assert {key: value for key, value in found.volume.items() if key != "name"} == source
    assert path.startswith(found.mount["mountPath"])
    assert found.mount["readOnly"]
    assert "initContainers" not in member_spec(uri=uri)


@pytest.mark.parametrize(
    "uri",
    [
        "hf://org",
        "hf://org/name@",
        "hf://org/../x",
        "s3://bucket",
        "s3://bucket//",
        "s3://Bucket/x",
        "image://a/b",
        "image://localhost:5000/a",
        "x",
    ],
)
def test_other_uris_do_not_match(uri: str) -> None:
    assert not re.fullmatch(MODEL_URI, uri)


def test_a_model_of_a_hub_is_fetched_into_the_engines_model_folder() -> None:
    spec = member_spec(**HUB)
    container, engine = fetcher_of(spec), spec["containers"][0]
    flags = dict(zip(container["command"][2::2], container["command"][3::2], strict=True))
    assert container["command"][:2] == ["baton-model", "fetch"]
    assert flags["--uri"] == HUB["uri"]
    read: EngineConfig = config_maps.engine_config(resolved(model=HUB), "decode")
    assert flags["--to"] == read.model.path
    assert flags["--http-port"] == "8000"
    assert "--only" not in flags
    mounts = {mount["mountPath"]: mount for mount in engine["volumeMounts"]}
    assert mounts["/models"]["readOnly"]
    assert not any(mount.get("readOnly") for mount in container["volumeMounts"])
    assert volume_of(spec) == {"emptyDir": {}}
    assert container["securityContext"] == engine["securityContext"]
    assert container["resources"] == {"limits": {"cpu": "4", "memory": "8Gi"}}, (
        "the fetcher requests a GPU"
    )


def test_a_gateway_fetches_no_weights_and_has_its_own_folder() -> None:
    wanted = resolved(model=HUB)
    spec = gateway_deployment.build(wanted)["spec"]["template"]["spec"]
    command = fetcher_of(spec)["command"]
    assert command[command.index("--only") + 1] == "tokenizer"
    read: GatewayConfig = config_maps.gateway_config(wanted)
    assert (
        command[command.index("--to") + 1]
        == read.model.path
        != config_maps.engine_config(wanted, "decode").model.path
    )


def test_models_and_revisions_have_different_folders() -> None:
    uris = ["hf://org/a", "hf://org/a@v1", "hf://org/a-v1", "s3://org/a", "s3://org/b/a"]
    assert len(
        {model_volume.source(Model(uri=uri), "decode", "default").path for uri in uris}
    ) == len(uris)


def test_a_uri_cannot_read_the_environment_of_the_fetcher() -> None:
    uri = "s3://bucket/$(AWS_SECRET_ACCESS_KEY)/$$(POD_IP)/$x"
    environment = {"AWS_SECRET_ACCESS_KEY": "secret", "POD_IP": "10.0.0.1"}
    deployment = gateway_deployment.build(resolved(model={"uri": uri}))
    for spec in (member_spec(uri=uri), deployment["spec"]["template"]["spec"]):
        words = command_line(fetcher_of(spec), environment)
        assert words[words.index("--uri") + 1] == uri


def test_namespaces_share_no_folder_of_a_host_path() -> None:
    """So a model that one namespace fetched with its credentials is not used by another."""
    on_node = Model(**HUB, cache=ModelCache(host_path="/var/models"))
    assert (
        model_volume.source(on_node, "decode", "team-a").path
        != model_volume.source(on_node, "decode", "team-b").path
    )
    in_claim = Model(**HUB, cache=ModelCache(claim="models"))
    assert (
        model_volume.source(in_claim, "decode", "team-a").path
        == model_volume.source(in_claim, "decode", "team-b").path
    ), "a claim belongs to one namespace, and its existing folders would not be found"


@pytest.mark.parametrize(
    ("cache", "source", "limit"),
    [
        (
            {"hostPath": "/var/models"},
            {"hostPath": {"path": "/var/models", "type": "DirectoryOrCreate"}},
            None,
        ),
        ({"claim": "models"}, {"persistentVolumeClaim": {"claimName": "models"}}, None),
        ({"sizeLimit": "2Gi"}, {"emptyDir": {"sizeLimit": "2Gi"}}, 2 * GIB),
        (
            {"claim": "models", "sizeLimit": "1Gi"},
            {"persistentVolumeClaim": {"claimName": "models"}},
            GIB,
        ),
    ],
)
def test_volumes_of_the_model_cache(cache: Object, source: Object, limit: int | None) -> None:
    spec = member_spec(**HUB, cache=cache)
    assert volume_of(spec) == source
    command = fetcher_of(spec)["command"]
    assert ("--max-bytes" in command) == (limit is not None)
    if limit is not None:
        assert command[command.index("--max-bytes") + 1] == str(limit)


def test_only_the_fetcher_gets_the_credentials() -> None:
    spec = member_spec(**HUB, credentialsSecret="hub-token")
    assert fetcher_of(spec)["envFrom"] == [{"secretRef": {"name": "hub-token"}}]
    assert "hub-token" not in str(spec["containers"]) + str(spec["volumes"])
