"""Scale to zero: a request scales the service up, and it scales down after the idle time."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from support.service.local_cluster import LocalClusterUnderTest, local_cluster, manifest
from support.waiting import eventually

NAME = "sleeper"
IDLE_S = 6
AUTOSCALING = {
    "minReplicas": 0,
    "maxReplicas": 2,
    "itlMilliseconds": 1000,
    "idleSeconds": IDLE_S,
    "holdSeconds": 120,
}


def sleeper(checkpoint: Path, **decode: Any) -> dict[str, Any]:
    service = manifest(NAME, checkpoint, prefill=0)
    service["spec"]["decode"] = {"replicas": 0, "autoscaling": AUTOSCALING, **decode}
    return service


@pytest.fixture(scope="module")
def cluster(checkpoints: dict[str, Path]) -> Iterator[LocalClusterUnderTest]:
    with local_cluster("embedded") as cluster:
        cluster.up(sleeper(checkpoints["qwen3"]))
        yield cluster


def decode_status(cluster: LocalClusterUnderTest) -> dict[str, Any]:
    decode: dict[str, Any] = cluster.get("llms", NAME)["status"]["decode"]
    return decode


@pytest.mark.timeout(300)
def test_a_request_scales_up_from_zero_and_the_idle_time_scales_down_again(
    cluster, checkpoints
) -> None:
    # The service starts without decode pods. `baton up` sends the first request.
    eventually(
        lambda: "lastScaleTime" in decode_status(cluster)["autoscaling"],
        timeout_s=60,
        what="a scale-up",
    )
    eventually(
        lambda: decode_status(cluster)["desired"] == 0,
        timeout_s=90,
        what=f"zero replicas after {IDLE_S} s",
    )
    eventually(lambda: not cluster.pods(NAME, "decode"), timeout_s=60, what="no decode pods")
    assert "tokens/s" in (cluster.home / "logs" / "supervisor.log").read_text(), (
        "the request of `baton up` got no response"
    )
    status = cluster.wait_ready(NAME)
    assert (status["decode"]["autoscaling"]["size"], status["decode"]["autoscaling"]["reason"]) == (
        0,
        "Idle",
    )
    assert cluster.condition(NAME, "DecodeReady")["reason"] == "ScaledToZero"
    assert cluster.condition(NAME, "ModelAvailable")["status"] == "True", (
        "the model was available before the scale-down"
    )

    client = openai.OpenAI(
        base_url=f"{status['endpoint']}/v1", api_key="unused", max_retries=0, timeout=120.0
    )
    assert [model.id for model in client.models.list()] == [NAME]
    answer = client.completions.create(
        model=NAME, prompt="who is there", max_tokens=8, temperature=0
    )
    assert answer.usage.completion_tokens > 0
    assert decode_status(cluster)["autoscaling"]["size"] == 1
    # Applying the manifest with `replicas: 0` again does not change the size.
    cluster.apply(sleeper(checkpoints["qwen3"]))
    assert cluster.wait_ready(NAME)["decode"]["desired"] == 1

    events = json.loads(cluster.kubectl("get", "events", "-o", "json"))["items"]
    messages = [event["message"] for event in events if event["reason"] == "Scaled"]
    assert any(
        message.startswith("decode 0 -> 1: requests waiting at the gateways: 1")
        for message in messages
    ), messages
    assert any(
        message.startswith(f"decode 1 -> 0: no requests for {IDLE_S} s") for message in messages
    ), messages


@pytest.mark.timeout(300)
def test_a_service_scaled_to_zero_by_hand_refuses_at_once_and_keeps_its_gateway(cluster) -> None:
    by_hand = {"spec": {"decode": {"autoscaling": None, "replicas": 1}}}
    cluster.kubectl("patch", f"llms/{NAME}", "--type=merge", "-p", json.dumps(by_hand))
    status = cluster.wait_ready(NAME)
    eventually(lambda: len(cluster.pods(NAME, "gateway")) == 1, timeout_s=60, what="one gateway")
    (gateway,) = cluster.pods(NAME, "gateway")
    client = openai.OpenAI(
        base_url=f"{status['endpoint']}/v1", api_key="unused", max_retries=0, timeout=120.0
    )
    request = {"model": NAME, "prompt": "who is there", "max_tokens": 8}

    cluster.kubectl("scale", f"llms/{NAME}", "--replicas=0")
    eventually(lambda: not cluster.pods(NAME, "decode"), timeout_s=60, what="no decode pods")
    began = time.monotonic()
    with pytest.raises(openai.InternalServerError, match="scaled to zero") as refused:
        client.completions.create(**request)
    assert time.monotonic() - began < 5.0, "the request waited for an engine"
    assert (refused.value.status_code, refused.value.response.headers["Retry-After"]) == (503, "60")

    cluster.kubectl("scale", f"llms/{NAME}", "--replicas=1")
    cluster.wait_ready(NAME)
    assert client.completions.create(**request).usage.completion_tokens > 0
    (kept,) = cluster.pods(NAME, "gateway")
    assert kept["metadata"]["uid"] == gateway["metadata"]["uid"]
