"""Services whose model comes from a hub, with credentials from a Secret and a cache on the node.

These run on the embedded control plane only: both control planes use the same kubelet.
"""

from __future__ import annotations

import base64
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from baton_protocol.options.config import GATEWAY_PORT
from pocketkube.ports import free_ports
from support.fetch.fake_hub import TOKEN, FakeHub, fake_hub, folder_files
from support.service.local_cluster import LocalClusterUnderTest, local_cluster, manifest
from support.waiting import eventually

SECRET = "hub-credentials"
URI = "hf://org/model"


def service(name: str, checkpoint: Path, uri: str, **model: Any) -> dict[str, Any]:
    wanted = manifest(name, checkpoint)
    wanted["spec"]["model"] |= {"uri": uri, "credentialsSecret": SECRET, **model}
    return wanted


def secret(**entries: str) -> dict[str, Any]:
    data = {name: base64.b64encode(value.encode()).decode() for name, value in entries.items()}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": SECRET, "namespace": "default"},
        "data": data,
    }


@pytest.fixture(scope="module")
def hub(checkpoints: dict[str, Path]) -> Iterator[FakeHub]:
    with fake_hub(folder_files(checkpoints["qwen3"])) as hub:
        hub.private = True
        yield hub


@pytest.fixture(scope="module")
def embedded(hub: FakeHub, checkpoints: dict[str, Path]) -> Iterator[LocalClusterUnderTest]:
    with local_cluster("embedded") as cluster:
        cluster.up(manifest("aside", checkpoints["qwen3"], prefill=0))
        cluster.kubectl("delete", "llms", "aside", "--wait=false")
        yield cluster


def complete(cluster: LocalClusterUnderTest, name: str) -> str:
    (gateway,) = cluster.pods(name, "gateway")
    body = json.dumps(
        {"model": name, "prompt": "Hello", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    ).encode()
    url = f"http://{gateway['status']['podIP']}:{GATEWAY_PORT}/v1/completions"
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return str(json.load(response)["choices"][0]["finish_reason"])


def test_a_model_of_a_private_hub_is_fetched_once_per_node_and_served(
    embedded: LocalClusterUnderTest, hub: FakeHub, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    embedded.apply(secret(HF_ENDPOINT=hub.url, HF_TOKEN=TOKEN))
    embedded.apply(
        service("hubbed", checkpoints["qwen3"], URI, cache={"hostPath": str(tmp_path / "cache")})
    )
    try:
        status = embedded.wait_ready("hubbed", timeout_s=180)
        available = embedded.condition("hubbed", "ModelAvailable")
        assert (available["status"], available["reason"]) == ("True", "Available"), available
        assert status["model"] == {"uri": URI, "revision": hub.commit}
        weights = {
            name: count for name, count in hub.downloads.items() if name.endswith(".safetensors")
        }
        assert weights, hub.downloads
        assert set(weights.values()) == {1}, "prefill and decode pods share the cache"
        assert complete(embedded, "hubbed") == "length"
    finally:
        embedded.kubectl("delete", "llms", "hubbed", "--wait=false")


@pytest.mark.parametrize(
    ("uri", "token", "reason"),
    [
        ("hf://org/no-such-model", TOKEN, "ModelMissing"),
        (URI, "hf_of_someone_else", "ModelAccessDenied"),
    ],
)
def test_conditions_report_why_a_model_cannot_be_fetched(
    embedded: LocalClusterUnderTest,
    hub: FakeHub,
    checkpoints: dict[str, Path],
    uri: str,
    token: str,
    reason: str,
) -> None:
    embedded.apply(secret(HF_ENDPOINT=hub.url, HF_TOKEN=token))
    name = reason.lower()
    embedded.apply(service(name, checkpoints["qwen3"], uri))
    try:

        def is_reported() -> bool:
            for type_ in ("ModelAvailable", "DecodeReady", "Ready"):
                found = embedded.condition(name, type_)
                assert (found["status"], found["reason"]) == ("False", reason), found
            return True

        eventually(is_reported, timeout_s=90, what=f"conditions with the reason {reason}")
    finally:
        embedded.kubectl("delete", "llms", name, "--wait=false")


def test_conditions_report_a_hub_that_does_not_respond_during_retries(
    embedded: LocalClusterUnderTest, checkpoints: dict[str, Path]
) -> None:
    (unused_port,) = free_ports(1)
    embedded.apply(secret(HF_ENDPOINT=f"http://127.0.0.1:{unused_port}"))
    embedded.apply(service("refused", checkpoints["qwen3"], URI))
    try:

        def is_reported() -> bool:
            for type_ in ("ModelAvailable", "DecodeReady", "Ready"):
                found = embedded.condition("refused", type_)
                assert (found["status"], found["reason"]) == ("False", "Fetching"), found
                assert "Connection refused; the pod tries again" in found["message"]
            return True

        eventually(
            is_reported, timeout_s=60, what="the error of the last attempt in the conditions"
        )
    finally:
        embedded.kubectl("delete", "llms", "refused", "--wait=false")


def test_conditions_report_a_missing_model_through_all_restarts(
    embedded: LocalClusterUnderTest, checkpoints: dict[str, Path]
) -> None:
    wanted = manifest("lost", checkpoints["qwen3"], prefill=0)
    wanted["spec"]["model"]["uri"] = "file:///models/no-such-folder"
    embedded.apply(wanted)
    try:

        def is_reported() -> bool:
            return all(
                (found["status"], found["reason"]) == ("False", "ModelNotFound")
                for found in (
                    embedded.condition("lost", type_) for type_ in ("ModelAvailable", "DecodeReady")
                )
            )

        def restarts() -> int:
            (member,) = embedded.pods("lost", "decode")
            return int(member["status"]["containerStatuses"][0]["restartCount"])

        eventually(is_reported, timeout_s=60, what="the conditions with the reason ModelNotFound")
        before = restarts()

        def restarted_twice() -> bool:
            if not is_reported():
                raise RuntimeError(
                    f"lost during a restart: {embedded.get('llms', 'lost')['status']}"
                )
            return restarts() >= before + 2

        eventually(restarted_twice, timeout_s=90, what="two more restarts")
    finally:
        embedded.kubectl("delete", "llms", "lost", "--wait=false")


def test_the_condition_reports_a_control_plane_without_image_volumes(
    cluster: LocalClusterUnderTest, checkpoints: dict[str, Path]
) -> None:
    """Kubernetes 1.20 has no image volumes."""
    if cluster.control_plane != "real" or "v1.20" not in cluster.kubectl("version", "-o", "json"):
        pytest.skip("the embedded control plane and newer servers accept image volumes")
    wanted = manifest("imaged", checkpoints["qwen3"])
    wanted["spec"]["model"] |= {"uri": "image://registry.example/models/small:v1"}
    cluster.apply(wanted)
    try:

        def is_reported() -> bool:
            found = cluster.condition("imaged", "ModelAvailable")
            assert (found["status"], found["reason"]) == ("False", "ImageVolumeUnsupported"), found
            return True

        eventually(is_reported, timeout_s=90, what="the condition")
    finally:
        cluster.kubectl("delete", "llms", "imaged", "--wait=false")
