"""A service on a local cluster from `kubectl apply` to tokens, on both control planes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import threading
import urllib.request

import openai
import psutil
import pytest
from tokenizers import Tokenizer

from support.parity import assert_greedy, prompts, reference_model
from support.service.local_cluster import LocalClusterUnderTest, manifest, processes_with_home
from support.waiting import eventually


def client_of(cluster: LocalClusterUnderTest, name: str, **options: object) -> openai.OpenAI:
    endpoint = cluster.get("llms", name)["status"]["endpoint"]
    options = {"max_retries": 0, "timeout": 120.0, **options}
    return openai.OpenAI(base_url=f"{endpoint}/v1", api_key="unused", **options)


def wait_until_answered(cluster: LocalClusterUnderTest, name: str, what: str) -> None:
    def is_answered() -> bool:
        try:
            answer = client_of(cluster, name).completions.create(
                model=name, prompt="again", max_tokens=8, temperature=0
            )
        except openai.OpenAIError as error:
            raise AssertionError(repr(error)) from error
        return answer.usage.completion_tokens > 0

    eventually(is_answered, timeout_s=30, what=what)


def metric(cluster: LocalClusterUnderTest, name: str, role: str, metric_name: str) -> float:
    """Return the sum of an engine metric over a role's pods."""
    total = 0.0
    for pod in cluster.pods(name, role):
        with urllib.request.urlopen(
            f"http://{pod['status']['podIP']}:8000/metrics", timeout=10
        ) as response:
            for line in response.read().decode().splitlines():
                if line.split("{")[0].split(" ")[0] == metric_name:
                    total += float(line.split()[-1])
    return total


@pytest.mark.timeout(600)
@pytest.mark.parametrize("arch", ["qwen3", "llama", "qwen3_moe"])
def test_greedy_tokens_equal_transformers_and_decode_recomputes_no_prompt(
    cluster, checkpoints, demo, arch
) -> None:
    name = demo
    if arch != "qwen3":
        name = arch.replace("_", "-")
        cluster.apply(manifest(name, checkpoints[arch]))
        cluster.wait_ready(name)
    client = client_of(cluster, name)
    vocab_size = Tokenizer.from_file(str(checkpoints[arch] / "tokenizer.json")).get_vocab_size()
    asked = prompts(32, vocab_size, longest=150, seed=11)
    computed_before = metric(cluster, name, "decode", "baton:prompt_tokens_computed_total")
    outputs: list[list[int]] = [[] for _ in asked]

    def ask(i: int) -> None:
        extra = {"ignore_eos": True, "return_token_ids": True}
        answer = client.completions.create(
            model=name, prompt=asked[i], max_tokens=48, temperature=0, extra_body=extra
        )
        outputs[i] = answer.choices[0].model_extra["token_ids"]

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(asked))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(output) for output in outputs] == [48] * len(asked)
    assert_greedy(
        reference_model(checkpoints[arch]),
        asked,
        outputs,
        f"{arch} over HTTP, {cluster.control_plane}",
    )
    assert metric(cluster, name, "decode", "baton:prompt_tokens_computed_total") == computed_before
    received = metric(cluster, name, "decode", "baton:prompt_tokens_remote_total")
    cached = metric(cluster, name, "decode", "baton:prompt_tokens_cached_total")
    assert received + cached >= sum(map(len, asked))
    if name != "demo":
        cluster.kubectl("delete", "llms", name, "--wait=true")
        eventually(
            lambda: not cluster.pods(name, "decode") and not cluster.pods(name, "prefill"),
            timeout_s=60,
            what=f"pods of the deleted {name} gone",
        )


def test_all_kv_moves_over_ucx_and_the_status_names_the_transport(cluster, demo) -> None:
    def moved() -> dict[str, dict[str, int]]:
        status = json.loads(cluster.baton("status", "-o", "json").stdout)
        return {pod["name"]: pod["kv_bytes"] for pod in status["pods"] if pod["role"] != "gateway"}

    prompt = "No other request has these words, so no block is cached: who carries the baton now?"
    received = metric(cluster, demo, "decode", "baton:kv_transfer_bytes_received_total")
    before = moved()["demo-decode-0"].get("ucx tcp/lo", 0)
    client_of(cluster, demo).completions.create(model=demo, prompt=prompt, max_tokens=4)
    received = metric(cluster, demo, "decode", "baton:kv_transfer_bytes_received_total") - received
    now = moved()
    assert received > 0
    assert now["demo-decode-0"]["ucx tcp/lo"] - before == received
    assert all(by_transport.keys() == {"ucx tcp/lo"} for by_transport in now.values()), (
        "the status names the transport of the UCX endpoints"
    )
    assert (
        metric(cluster, demo, "decode", "baton:kv_transfer_bytes_total")
        == now["demo-decode-0"]["ucx tcp/lo"]
    )


def test_openai_client_streams_through_the_service_and_through_the_ingress(cluster, demo) -> None:
    messages = [{"role": "user", "content": "Who carries the baton?"}]
    direct = client_of(cluster, demo)
    assert [model.id for model in direct.models.list()] == [demo]
    whole = direct.chat.completions.create(
        model=demo, messages=messages, max_tokens=24, temperature=0
    )
    ports = [
        node["metadata"]["annotations"].get("pocketkube/ingress-port")
        for node in cluster.get("nodes")["items"]
    ]
    ingress = openai.OpenAI(
        base_url=f"http://127.0.0.1:{ports[0]}/v1",
        api_key="unused",
        max_retries=0,
        timeout=60.0,
        default_headers={"Host": "demo.localhost"},
    )
    for client in (direct, ingress):
        stream = client.chat.completions.create(
            model=demo,
            messages=messages,
            max_tokens=24,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == whole.choices[0].message.content
        counts = (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens)
        assert counts == (whole.usage.prompt_tokens, whole.usage.completion_tokens)
        assert sum(bool(chunk.choices and chunk.choices[0].delta.content) for chunk in chunks) > 1


def test_scaling_decode_loses_no_running_request(cluster, demo) -> None:
    client = client_of(cluster, demo)
    stop = threading.Event()
    done: list[int] = []
    failures: list[str] = []

    def load(worker: int) -> None:
        while not stop.is_set():
            try:
                answer = client.completions.create(
                    model=demo,
                    prompt=f"worker {worker} asks for the {len(done)}th time",
                    max_tokens=32,
                    temperature=0,
                    extra_body={"ignore_eos": True},
                )
                done.append(answer.usage.completion_tokens)
            except openai.OpenAIError as error:
                failures.append(repr(error))

    threads = [threading.Thread(target=load, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    try:
        cluster.kubectl("scale", "llms/demo", "--replicas=3")
        eventually(
            lambda: cluster.wait_ready(demo)["decode"]["ready"] == 3,
            timeout_s=120,
            what="3 decode pods ready",
        )
        cluster.kubectl("scale", "llms/demo", "--replicas=1")
        eventually(
            lambda: len(cluster.pods(demo, "decode")) == 1, timeout_s=120, what="1 decode pod left"
        )
        answered = len(done)
        eventually(lambda: len(done) > answered + 4, timeout_s=60, what="requests after scaling")
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not failures, failures
    assert set(done) == {32}


@pytest.mark.parametrize("role", ["prefill", "decode", "gateway"])
def test_a_killed_pod_process_is_restarted_and_reported_in_conditions(cluster, demo, role) -> None:
    pod = cluster.pods(demo, role)[0]["metadata"]["name"]
    process = cluster.process_of(pod)
    ready = '.status.conditions[?(@.type=="Ready")]'
    columns = f'jsonpath={{{ready}.status}} {{{ready}.reason}}{{"\\n"}}'
    # A watch: a gateway may be ready again before the next `kubectl get`.
    with cluster.following("get", "llms", demo, "--watch", "-o", columns) as printed:
        eventually(lambda: printed().startswith("True"), timeout_s=30, what="the present condition")
        os.kill(process.pid, signal.SIGKILL)
        eventually(
            lambda: re.search(r"^False \w+$", printed(), re.MULTILINE),
            timeout_s=60,
            what=f"Ready=False and its reason after the {role} died",
        )
    cluster.wait_ready(demo)
    restarted = next(p for p in cluster.pods(demo, role) if p["metadata"]["name"] == pod)
    assert restarted["status"]["containerStatuses"][0]["restartCount"] >= 1
    wait_until_answered(cluster, demo, "an answer after the restart")


@pytest.mark.parametrize("component", ["operator", "proxy", "kubelet"])
def test_a_killed_component_of_the_local_cluster_is_started_again(cluster, demo, component) -> None:
    def running() -> psutil.Process | None:
        for process in processes_with_home(cluster.home):
            with contextlib.suppress(psutil.Error):
                words = process.cmdline()
                if any(
                    word.endswith((f"baton-{component}", f"pocketkube.{component}"))
                    for word in words
                ):
                    return process
        return None

    victim = running()
    victim.kill()
    eventually(
        lambda: (again := running()) is not None and again.pid != victim.pid,
        timeout_s=30,
        what=f"another {component} process",
    )
    cluster.wait_ready(demo)
    cluster.kubectl("scale", "llms/demo", "--replicas=2")
    eventually(
        lambda: cluster.wait_ready(demo)["decode"]["ready"] == 2,
        timeout_s=90,
        what="2 decode pods ready",
    )
    wait_until_answered(cluster, demo, f"an answer after the {component}'s death")


def test_a_missing_model_is_reported_until_it_exists(cluster, checkpoints, tmp_path) -> None:
    path = tmp_path / "later"
    cluster.apply(manifest("late", path, prefill=0))

    def is_reported() -> bool:
        condition = cluster.condition("late")
        assert condition["reason"] == "ModelNotFound", condition
        return condition["status"] == "False" and str(path) in condition["message"]

    eventually(is_reported, timeout_s=90, what="Ready=False, ModelNotFound with the path")
    path.symlink_to(checkpoints["llama"])
    cluster.wait_ready("late")
    answer = client_of(cluster, "late").completions.create(
        model="late", prompt="hello", max_tokens=4
    )
    assert answer.usage.completion_tokens > 0
    cluster.kubectl("delete", "llms", "late")


def test_kubectl_follows_services_and_logs(cluster, demo) -> None:
    pod = cluster.pods(demo, "decode")[0]["metadata"]["name"]
    assert cluster.kubectl("logs", pod, "--tail=1").count("\n") <= 1
    with (
        cluster.following("get", "llms", "-w") as watched,
        cluster.following("logs", "-f", pod) as logged,
    ):
        eventually(
            lambda: re.search(r"^demo .*\n", watched(), re.MULTILINE),
            timeout_s=30,
            what="the service in `kubectl get -w`",
        )
        eventually(lambda: "\n" in logged(), timeout_s=30, what="lines of `kubectl logs -f`")
        header, *rows = (line.split() for line in watched().splitlines())
        shown = dict(zip(header, next(row for row in rows if row[0] == "demo"), strict=False))
        assert (shown["READY"], shown["AVAILABLE"]) == ("True", "True")
        lines = watched().count("\n")
        cluster.kubectl("scale", "llms/demo", "--replicas=2")
        eventually(
            lambda: watched().count("\n") > lines,
            timeout_s=60,
            what="another line of `kubectl get -w`",
        )
        length = len(logged())
        cluster.process_of(pod).send_signal(signal.SIGTERM)
        eventually(
            lambda: len(logged()) > length,
            timeout_s=60,
            what="the engine's last log lines in `kubectl logs -f`",
        )
