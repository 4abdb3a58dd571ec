"""`baton-gateway` as a process: configuration errors, its address and SIGTERM."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
from pathlib import Path

import aiohttp
import pytest

from baton_gateway.cli import OPTIONS, ConfigurationError, load_config, main, make_discovery
from baton_protocol.options.config import DiscoveryConfig
from support.gateway.fake_engine import FakeEngine
from support.hostile.attack import Attack, parametrize
from support.hostile.tokenizers import DEFAULTS_ATTACKS, TEXT_ATTACKS
from support.waiting import until


def test_no_two_options_share_a_flag() -> None:
    assert len({option.flag for option in OPTIONS}) == len(OPTIONS)


@pytest.mark.parametrize("flag", ["--dtype", "--quantization", "--max-model-len"])
def test_model_options_that_only_engines_read_have_no_flag(flag: str) -> None:
    with pytest.raises(ConfigurationError, match=f"unrecognized arguments: {flag}"):
        load_config(["--model", "/m", "--discovery-file", "f", flag, "1"])


def test_flags_override_the_file(tmp_path: Path) -> None:
    path = tmp_path / "gateway.json"
    path.write_text(
        json.dumps(
            {"model": {"path": "/m", "served_name": "a"}, "discovery": {"file": "f"}, "port": 1}
        )
    )
    config = load_config(["--config", str(path), "--port", "2", "--served-model-name", "b"])
    assert (config.model.path, config.model.served_name, config.discovery.file, config.port) == (
        "/m",
        "b",
        "f",
        2,
    )


def test_responses_have_no_time_limit_by_default() -> None:
    config = load_config(["--model", "/m"])
    assert config.request_timeout_s == config.inter_token_timeout_s == 0


@pytest.mark.parametrize(
    ("argv", "reason", "text"),
    [
        ([], "InvalidConfig", "--model"),
        (
            ["--model", "/nowhere/m", "--discovery-file", "f"],
            "ModelNotFound",
            "/nowhere/m does not exist",
        ),
        (["--config", "/nowhere/g.json"], "InvalidConfig", "/nowhere/g.json"),
        (["--port", "many"], "InvalidConfig", "--port"),
        (
            ["--model", "/m", "--discovery-file", "f", "--port", "99999"],
            "InvalidConfig",
            "port must be in [0, 65535]",
        ),
        (["--model", "/m", "--request-timeout-s", "-1"], "InvalidConfig", "request_timeout_s"),
        (
            ["--model", "/m", "--request-timeout-s", "nan"],
            "InvalidConfig",
            "request_timeout_s must not be negative",
        ),
        (
            ["--model", "/m", "--drain-timeout-s", "nan"],
            "InvalidConfig",
            "drain_timeout_s must not be negative",
        ),
        (["--model", "/m", "--heartbeat-interval-s", "0"], "InvalidConfig", "heartbeat_interval_s"),
        (
            ["--model", "/m", "--heartbeat-timeout-s", "1"],
            "InvalidConfig",
            "heartbeat_timeout_s must be at least 3 times",
        ),
        (["--model", "/m", "--client-timeout-s", "0"], "InvalidConfig", "client_timeout_s"),
        (["--model", "/m", "--queue-wait-s", "-1"], "InvalidConfig", "queue_wait_s"),
    ],
)
def test_configuration_errors_exit_with_78_and_a_fatal_line(argv, reason, text, capsys) -> None:
    assert main(argv) == 78
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith(f"FATAL {reason}: ")
    assert text in last


def test_an_unknown_field_in_the_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "gateway.json"
    path.write_text('{"model": {"path": "/m"}, "discovery": {"file": "f"}, "prot": 1}')
    with pytest.raises(ConfigurationError, match="prot"):
        load_config(["--config", str(path)])


def test_exactly_one_discovery_must_be_configured() -> None:
    for config in (DiscoveryConfig(), DiscoveryConfig(file="x", service="y")):
        with pytest.raises(ConfigurationError, match="exactly one"):
            make_discovery(config)


def test_a_model_without_a_discovery_is_refused(tokenizer_folder: Path, capsys) -> None:
    assert main(["--model", str(tokenizer_folder)]) == 78
    assert "FATAL InvalidConfig: discovery" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"), [(None, "cannot be read"), ("short", "at least 16 bytes, this one 5")]
)
def test_an_invalid_service_key_file_is_refused_with_its_path(
    tmp_path: Path, tokenizer_folder: Path, capsys, content, message
) -> None:
    path = tmp_path / "key"
    if content is not None:
        path.write_text(content)
    flags = [
        "--model",
        str(tokenizer_folder),
        "--discovery-file",
        "f",
        "--service-key-file",
        str(path),
    ]
    assert main(flags) == 78
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith(f"FATAL ServiceKeyInvalid: service_key_file {path}")
    assert message in last


async def test_the_process_serves_on_its_pod_ip_and_exits_with_0_on_sigterm(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    engine = FakeEngine("d", "decode", [300, 301])
    discovery = tmp_path / "engines.json"
    endpoint = {"name": "d", "role": "decode", "host": "127.0.0.1", "engine_port": engine.port}
    discovery.write_text(json.dumps({"engines": [endpoint]}))
    address = f"127.88.{os.getpid() % 250}.{os.getpid() // 250 % 250 + 1}"
    argv = [
        "--model",
        str(tokenizer_folder),
        "--served-model-name",
        "m",
        "--discovery-file",
        str(discovery),
    ]
    with open(tmp_path / "log", "wb") as log:  # noqa: ASYNC230 (a local file, handed to the child)
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "baton_gateway.cli",
            *argv,
            env={**os.environ, "POD_IP": address},
            stderr=log,
        )
    try:
        async with aiohttp.ClientSession() as session:

            async def ready() -> bool:
                assert process.returncode is None, (tmp_path / "log").read_text()
                try:
                    async with session.get(f"http://{address}:8080/ready") as response:
                        return response.status == 200
                except aiohttp.ClientError:
                    return False

            await until(ready, "the gateway ready")
            url, body = f"http://{address}:8080/tokenize", {"prompt": "a", "hue": 1}
            async with session.post(url, json=body, headers={"X-Request-Id": "r7"}):
                pass
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 60) == 0
        assert "[r7] a request has the unknown field 'hue'" in (tmp_path / "log").read_text()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        engine.die()


@parametrize([*TEXT_ATTACKS[::6], *DEFAULTS_ATTACKS[::4]])
def test_a_hostile_checkpoint_ends_the_gateway_with_the_file_in_the_reason(
    tokenizer_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], attack: Attack
) -> None:
    model = Path(shutil.copytree(tokenizer_folder, tmp_path / "model"))
    attack.apply(model)
    assert main(["--model", str(model), "--discovery-file", str(tmp_path / "f")]) == os.EX_CONFIG
    last = capfd.readouterr().err.splitlines()[-1]
    assert last.startswith(("FATAL InvalidTokenizer: ", "FATAL ModelInvalid: "))
    assert str(model / attack.file) in last
