"""A service with API keys and TLS: access, key rotation, and the switch back to HTTP."""

from __future__ import annotations

import json
import ssl
from pathlib import Path

import openai
import pytest

from support.gateway.certificates import write_certificate
from support.service.local_cluster import LocalClusterUnderTest, manifest
from support.waiting import eventually

NAME = "guarded"


@pytest.mark.timeout(400)
def test_only_clients_with_a_key_are_served_and_only_over_https(
    cluster: LocalClusterUnderTest, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    write_certificate(tmp_path / "tls", NAME)
    files = {file: (tmp_path / "tls" / file).read_text() for file in ("tls.crt", "tls.key")}
    for name, kind, entries in (
        ("guarded-tls", "kubernetes.io/tls", files),
        ("guarded-clients", "Opaque", {"team-a": "the-first-key-of-team-a"}),
    ):
        metadata = {"name": name, "namespace": "default"}
        cluster.apply(
            {
                "apiVersion": "v1",
                "kind": "Secret",
                "metadata": metadata,
                "type": kind,
                "stringData": entries,
            }
        )
    gateway = {"apiKeys": {"secretName": "guarded-clients"}, "tls": {"secretName": "guarded-tls"}}
    cluster.apply(
        manifest(
            NAME,
            checkpoints["qwen3"],
            prefill=0,
            gateway={**gateway, "limits": {"maxCompletionTokens": 4}},
        )
    )
    try:
        endpoint = cluster.wait_ready(NAME)["endpoint"]
        assert endpoint.startswith("https://")
        trusted = ssl.create_default_context(cafile=str(tmp_path / "tls/tls.crt"))
        trusted.check_hostname = False  # the certificate does not have the Service's address
        http = openai.DefaultHttpxClient(verify=trusted, trust_env=False)
        client = openai.OpenAI(
            base_url=f"{endpoint}/v1",
            api_key="the-first-key-of-team-a",
            http_client=http,
            max_retries=0,
            timeout=60,
        )
        answer = client.completions.create(
            model=NAME, prompt="hello", temperature=0, extra_body={"ignore_eos": True}
        )
        assert answer.usage.completion_tokens == 4
        stranger = client.with_options(api_key="the-second-key-of-team-a")
        with pytest.raises(openai.AuthenticationError):
            stranger.models.list()

        data = {"stringData": {"team-a": "the-second-key-of-team-a\n"}}
        cluster.kubectl(
            "patch", "secret", "guarded-clients", "--type=merge", "-p", json.dumps(data)
        )

        def replaced() -> bool:
            try:
                return bool(stranger.models.list().data)
            except openai.AuthenticationError:
                return False

        eventually(replaced, timeout_s=90, what="the new key to reach the gateway")
        with pytest.raises(openai.AuthenticationError):
            client.models.list()

        # TLS is switched off. At any time the old or the new gateway must respond.
        plain = endpoint.replace("https://", "http://")
        cluster.kubectl(
            "patch", "llms", NAME, "--type=merge", "-p", '{"spec": {"gateway": {"tls": null}}}'
        )

        def answers(url: str) -> bool:
            try:
                return bool(stranger.with_options(base_url=f"{url}/v1").models.list().data)
            except openai.APIConnectionError:
                return False

        def switched() -> bool:
            # Check the new endpoint first, because the old gateway runs until the new one is ready.
            assert answers(plain) or answers(endpoint), "neither gateway serves"
            return bool(
                cluster.get("llms", NAME)["status"]["endpoint"] == plain and not answers(endpoint)
            )

        eventually(switched, timeout_s=90, what="the gateway to serve HTTP only")
        assert answers(plain)
    finally:
        cluster.kubectl("delete", "llms", NAME, "--wait=true")
        cluster.kubectl("delete", "secret", "guarded-tls", "guarded-clients")
    eventually(
        lambda: not cluster.pods(NAME, "decode"),
        timeout_s=60,
        what="pods of the deleted service gone",
    )
