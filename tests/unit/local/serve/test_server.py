"""`baton serve` with real processes on a tiny checkpoint."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import openai
import psutil
import pytest

from baton_engine.random_checkpoint import create_checkpoint
from baton_local.serve.server import run_serve
from pocketkube.ports import free_ports
from support.fetch.fake_hub import fake_hub, folder_files
from support.waiting import eventually

READY_S = 180.0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = create_checkpoint(
        tmp_path_factory.mktemp("serve") / "tiny",
        "qwen3",
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        vocab_size=512,
    )
    for name in ("aiohttp", "msgspec", "resource"):
        (path / f"{name}.py").write_text("raise SystemExit('imported')")
    return path


class Serve:
    """A running `baton serve` in the model's folder, whose modules it must not import."""

    def __init__(self, folder: Path, model: Path, *flags: str) -> None:
        self._out, self._log = folder / "stdout", folder / "stderr"
        command = [
            sys.executable,
            "-P",
            "-m",
            "baton_local.cli",
            "serve",
            str(model),
            "--port",
            "0",
            *flags,
        ]
        path = os.pathsep.join(filter(None, sys.path))
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        cwd = model if model.is_dir() else folder
        with open(self._out, "wb") as out, open(self._log, "wb") as log:
            self.process = subprocess.Popen(command, stdout=out, stderr=log, env=env, cwd=cwd)
        self.children: list[psutil.Process] = []

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def url(self) -> str:
        def found() -> str:
            assert self.process.poll() is None, self.log
            match = re.search(
                r"^curl (http://[\d.:]+)/v1/chat/completions", self._out.read_text(), re.MULTILINE
            )
            assert match, self.log
            return match[1]

        url = eventually(found, timeout_s=READY_S, what="baton serve ready")
        self.children = psutil.Process(self.process.pid).children(recursive=True)
        return url

    def child(self, module: str) -> psutil.Process:
        return next(child for child in self.children if module in child.cmdline())

    def wait(self, timeout_s: float = 60.0) -> int:
        return self.process.wait(timeout_s)

    def assert_no_orphans(self) -> None:
        def gone() -> bool:
            left = [
                p.pid
                for p in self.children
                if p.is_running() and p.status() != psutil.STATUS_ZOMBIE
            ]
            assert not left, f"still running: {left}"
            return True

        assert self.children
        eventually(gone, timeout_s=60, what="no child of baton serve left")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def serve(tmp_path: Path, checkpoint: Path) -> Iterator[Serve]:
    flags = [
        "--served-model-name",
        "m",
        "--num-blocks",
        "256",
        "--num-threads",
        "1",
        "--dtype",
        "float32",
    ]
    serving = Serve(tmp_path, checkpoint, *flags)
    yield serving
    serving.close()


def client_of(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=30)


def stream(client: openai.OpenAI, max_tokens: int) -> openai.Stream:
    return client.completions.create(
        model="m",
        prompt="hello",
        max_tokens=max_tokens,
        stream=True,
        extra_body={"ignore_eos": True},
    )


def test_serve_answers_and_finishes_running_requests_after_sigterm(serve: Serve) -> None:
    client = client_of(serve.url)
    assert [model.id for model in client.models.list()] == ["m"]
    chunks = stream(client, 400)
    first = next(chunks)
    serve.process.send_signal(signal.SIGTERM)
    rest = list(chunks)
    assert first.choices[0].finish_reason is None
    assert rest[-1].choices[0].finish_reason == "length"
    assert serve.wait() == 0
    serve.assert_no_orphans()
    assert re.search(r"^\[engine\] .* loaded in", serve.log, re.MULTILINE)
    assert re.search(r"^\[gateway\] ", serve.log, re.MULTILINE)
    assert "baton serve: ready: http://127.0.0.1:" in serve.log


def test_serve_ends_with_a_reason_and_fails_requests_when_the_engine_is_killed(
    serve: Serve,
) -> None:
    client = client_of(serve.url)
    errors: list[Exception] = []

    def ask() -> None:
        try:
            list(stream(client, 3000))
        except Exception as error:
            errors.append(error)

    waiting = threading.Thread(target=ask)
    waiting.start()
    eventually(lambda: has_request_in_flight(serve), timeout_s=60, what="a running request")
    serve.child("baton_engine.cli").kill()
    waiting.join(5.0)
    assert not waiting.is_alive(), "the client got no error"
    assert len(errors) == 1
    assert isinstance(errors[0], openai.APIError)
    assert "shut down" in str(errors[0]) or "lost" in str(errors[0])
    assert serve.wait() == 1
    assert "baton serve: the engine was killed by SIGKILL" in serve.log.splitlines()[-1]
    serve.assert_no_orphans()


def test_the_engine_refuses_requests_without_the_service_key(serve: Serve) -> None:
    """Another user of the machine, or a web page, could stop the engine with one request."""
    client = client_of(serve.url)
    command = serve.child("baton_engine.cli").cmdline()
    port = command[command.index("--http-port") + 1]
    for path in ("/drain", "/sleep?level=2", "/pause?mode=abort"):
        attack = urllib.request.Request(f"http://127.0.0.1:{port}{path}", method="POST")
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(attack, timeout=30)
        assert refused.value.code == 401
    assert next(stream(client, 4)).choices
    key = Path(command[command.index("--service-key-file") + 1])
    assert (key.stat().st_mode & 0o777, key.parent.stat().st_mode & 0o777) == (0o600, 0o700)


@pytest.mark.parametrize("streams", [False, True])
def test_the_exception_of_an_engine_is_in_the_log_and_not_in_the_response(
    tmp_path: Path, checkpoint: Path, streams: bool
) -> None:
    executor = "support.engine.engine_fakes.FakeExecutor"  # fails with [13, 13, 13]
    serving = Serve(tmp_path, checkpoint, "--executor", executor, "--served-model-name", "m")
    try:
        body = {"model": "m", "prompt": [13, 13, 13], "stream": streams}
        attack = urllib.request.Request(
            f"{serving.url}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with pytest.raises(urllib.error.HTTPError) as failed:
            urllib.request.urlopen(attack, timeout=60)
        answer = str(failed.value.headers) + failed.value.read().decode()
        assert serving.wait() == 1
    finally:
        serving.close()
    assert "on fire" not in answer
    found = re.search(r"log has the reason under the id ([\w-]+)\.", answer)
    assert found, answer
    assert re.search(rf"{found[1]}.*the device is on fire", serving.log), serving.log


def has_request_in_flight(serve: Serve) -> bool:
    """Return whether the gateway has a request in flight."""
    config = json.loads(Path(serve.child("baton_gateway.cli").cmdline()[-1]).read_text())
    port = config["metrics_port"]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as response:
        return "baton:requests_in_flight 1.0" in response.read().decode()


def test_metrics_are_on_their_port_of_loopback_only(tmp_path: Path, checkpoint: Path) -> None:
    """Other machines could read the metrics of an endpoint with --host 0.0.0.0."""
    (port,) = free_ports(1)
    flags = ["--host", "0.0.0.0", "--metrics-port", str(port), "--served-model-name", "m"]
    serving = Serve(tmp_path, checkpoint, *flags)
    try:
        assert serving.url
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as response:
            assert "baton:engines_ready" in response.read().decode()
        with pytest.raises(urllib.error.URLError, match="refused"):
            urllib.request.urlopen(f"http://127.0.0.2:{port}/metrics", timeout=30)
    finally:
        serving.close()


def test_kill_9_leaves_no_child_process(serve: Serve) -> None:
    assert serve.url
    serve.process.kill()
    serve.process.wait()
    serve.assert_no_orphans()


@pytest.mark.parametrize(
    ("model", "flags", "code", "last_line"),
    [
        (
            "nowhere",
            [],
            78,
            r"FATAL ModelNotFound: .*nowhere does not exist: .*baton serve download ORG/NAME.*",
        ),
        ("", ["--dtype", "int3"], 78, r"FATAL \w+: .*int3.*"),
        (
            "",
            ["--allowed-origins", "https://a.example,b.example"],
            78,
            r"FATAL InvalidConfig: access\.allowed_origins must be origins .*'b\.example'.*",
        ),
        (
            "",
            ["--min-priority", "1"],
            78,
            r"FATAL InvalidConfig: access\.min_priority must be in \[-2147483648, 0\], got 1",
        ),
        (
            "",
            ["--no-such-flag"],
            78,
            "FATAL InvalidConfig: unrecognized arguments: --no-such-flag",
        ),
        (
            "",
            ["--host", "192.0.2.1"],
            1,
            r"baton serve: cannot listen on 192\.0\.2\.1:0: .*; see --host and --port",
        ),
        ("", ["--port", "65536"], 2, r".*--port: must be in \[0, 65535\], got 65536"),
        ("", ["--engine-port", "5"], 2, r".*--engine-port cannot be given: baton serve sets it"),
    ],
)
def test_the_last_log_line_names_an_invalid_argument(
    tmp_path: Path, checkpoint: Path, model: str, flags: list[str], code: int, last_line: str
) -> None:
    serving = Serve(tmp_path, checkpoint / model if model else checkpoint, *flags)
    try:
        assert serving.wait(READY_S) == code, serving.log
        assert re.fullmatch(last_line, serving.log.splitlines()[-1]), serving.log
        assert serving.log.count("FATAL") == (code == 78)
        assert "usage: baton-engine" not in serving.log
    finally:
        serving.close()


def test_serve_ends_when_it_is_not_ready_within_the_timeout(
    tmp_path: Path, checkpoint: Path
) -> None:
    serving = Serve(tmp_path, checkpoint, "--ready-timeout-s", "0.1")
    try:
        assert serving.wait(READY_S) == 1
        assert "not ready within 0.1 s" in serving.log
    finally:
        serving.close()


def test_request_parameters_reach_the_engine(serve: Serve) -> None:
    client = client_of(serve.url)

    def ask(**fields: object) -> openai.types.Completion:
        known = {"model": "m", "prompt": "hello", "max_tokens": 8, "seed": 3}
        return client.completions.create(**known, extra_body={"ignore_eos": True} | fields)

    samples = [choice.text for choice in ask(n=4).choices]
    assert len(set(samples)) == 4
    assert ask(n=4).choices[2].text == samples[2]
    alone = ask().choices[0].text
    assert alone == samples[0], "a sample depends on the number of samples"
    assert ask(n=2, best_of=4).choices[0].text in samples
    best, second = ask(n=2, use_beam_search=True).choices
    assert best.text != second.text
    echoed = ask(n=2, echo=True, logprobs=1).choices
    for choice in echoed:
        assert choice.text.startswith("hello")
        assert choice.logprobs.token_logprobs[0] is None
        assert all(value < 0 for value in choice.logprobs.token_logprobs[1:])
    assert ask(guided_choice=["left", "right"], ignore_eos=False).choices[0].text in (
        "left",
        "right",
    )
    assert re.fullmatch(
        "[0-9]{3}", ask(structured_outputs={"regex": "[0-9]{3}"}, ignore_eos=False).choices[0].text
    )
    token_ids = (
        ask(allowed_token_ids=[70, 71], return_token_ids=True).choices[0].model_extra["token_ids"]
    )
    assert set(token_ids) <= {70, 71}
    repetition = {"max_pattern_size": 1, "min_count": 4}
    repeated = ask(allowed_token_ids=[70], repetition_detection=repetition).choices[0]
    assert repeated.finish_reason == "repetition"
    with pytest.raises(openai.BadRequestError) as caught:
        ask(guided_regex="(")
    assert caught.value.param == "guided_regex"
    with pytest.raises(openai.BadRequestError) as caught:
        ask(prompt=[5] * 5000)
    assert caught.value.code == "context_length_exceeded"


def test_a_model_of_a_hub_is_downloaded_before_the_engine_starts(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["--download-dir", str(tmp_path / "cache"), "--revision", "v1", "--num-blocks", "64"]
    with fake_hub(folder_files(checkpoint)) as hub:
        hub.branch = "v1"
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        serving = Serve(tmp_path, Path("org/model"), *flags)
        try:
            client = client_of(serving.url)
            assert [model.id for model in client.models.list()] == ["org/model"]
            assert re.search(r"^\[download\] .* hf://org/model@v1", serving.log, re.MULTILINE)
        finally:
            serving.close()
    assert not list((tmp_path / "cache").glob("*/*.py"))


def test_a_download_that_fails_is_the_reason_for_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    serving = Serve(tmp_path, Path("org/model"), "--download-dir", str(tmp_path / "cache"))
    try:
        assert serving.wait(READY_S) == 78, serving.log
        *_, advice, last_line = serving.log.splitlines()
        assert re.fullmatch(r"baton serve: there is no local folder org/model, .*", advice)
        assert re.fullmatch(r"FATAL ModelSourceUnavailable: .*HF_HUB_OFFLINE.*", last_line)
    finally:
        serving.close()


def test_an_invalid_uri_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_serve("https://host/model", []) == 78
    assert capfd.readouterr().err.startswith("FATAL ModelUriInvalid: ")


def test_a_revision_of_a_folder_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run_serve("/models/m", ["--revision", "v1"])
    assert ended.value.code == 2
    assert "the folder /models/m has no revision" in capfd.readouterr().err
