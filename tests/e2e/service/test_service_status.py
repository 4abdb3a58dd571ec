"""Conditions for incompatible peers and missing Secrets, from real engines and the kubelet."""

from __future__ import annotations

import json
from pathlib import Path

import openai
import pytest

from support.service.local_cluster import LocalClusterUnderTest, manifest
from support.waiting import eventually

NAME = "status"
OTHER_BLOCKS = {"spec": {"containers": [{"name": "engine", "args": ["--block-size", "32"]}]}}


def wait_condition(cluster: LocalClusterUnderTest, kind: str, status: str, reason: str) -> str:
    """Wait for the condition `kind` with this status and reason. Return its message."""

    def probe() -> str:
        found = cluster.condition(NAME, kind)
        assert (found["status"], found["reason"]) == (status, reason), cluster.get(
            "llms", NAME
        ).get("status")
        return f"{found['message']}"

    return eventually(probe, timeout_s=90, what=f"{kind} {status} {reason}") or ""


@pytest.mark.timeout(400)
def test_conditions_report_incompatible_pods_and_a_missing_secret(
    cluster: LocalClusterUnderTest, checkpoints: dict[str, Path]
) -> None:
    service = manifest(
        NAME, checkpoints["qwen3"], gateway={"apiKeys": {"secretName": "status-clients"}}
    )
    service["spec"]["decode"]["template"] = OTHER_BLOCKS
    cluster.apply(service)
    try:
        message = wait_condition(cluster, "GatewayReady", "False", "SecretNotFound")
        assert "Secret status-clients does not exist" in message
        metadata = {"name": "status-clients", "namespace": "default"}
        cluster.apply(
            {
                "apiVersion": "v1",
                "kind": "Secret",
                "metadata": metadata,
                "stringData": {"me": "a-key-of-22-characters"},
            }
        )
        wait_condition(cluster, "GatewayReady", "True", "PodsReady")

        message = wait_condition(cluster, "PrefillReady", "False", "IncompatiblePeers")
        assert f"block_size is 16 at {NAME}-prefill-0 and 32 at {NAME}-decode-0" in message
        assert cluster.condition(NAME, "DecodeReady")["status"] == "True"
        assert cluster.condition(NAME)["reason"] == "IncompatiblePeers"
        endpoint = cluster.get("llms", NAME)["status"]["endpoint"]
        client = openai.OpenAI(
            base_url=f"{endpoint}/v1",
            api_key="a-key-of-22-characters",
            max_retries=0,
            timeout=120.0,
        )
        answer = client.completions.create(
            model=NAME, prompt="who is there " * 20, max_tokens=4, temperature=0
        )
        assert answer.usage.completion_tokens > 0
        events = json.loads(cluster.kubectl("get", "events", "-o", "json"))["items"]
        reasons = {event["reason"] for event in events if event["involvedObject"]["name"] == NAME}
        assert {"SecretNotFound", "IncompatiblePeers"} <= reasons

        patch = [{"op": "remove", "path": "/spec/decode/template"}]
        cluster.kubectl("patch", "llms", NAME, "--type=json", "-p", json.dumps(patch))
        cluster.wait_ready(NAME)
        assert cluster.condition(NAME, "PrefillReady")["reason"] == "PodsReady"
    finally:
        cluster.kubectl("delete", "llms", NAME, "--wait=true")
        cluster.kubectl("delete", "secret", "status-clients", "--ignore-not-found")
    eventually(
        lambda: not cluster.pods(NAME, "decode"),
        timeout_s=60,
        what="pods of the deleted service gone",
    )
