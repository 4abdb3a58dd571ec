"""Flags of `baton-engine`: every option has a flag, and a wrong value is refused with its field."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from baton_engine.cli import main, parse_config
from baton_engine.models.errors import ConfigurationError
from baton_protocol.options.engine_options import OPTIONS


def test_no_two_options_share_a_flag() -> None:
    assert len({option.flag for option in OPTIONS}) == len(OPTIONS)


@pytest.mark.parametrize("flags", [[], ["--dtype", "float32"]])
def test_a_missing_model_is_refused_with_its_flag(flags: list[str]) -> None:
    with pytest.raises(ConfigurationError, match="pass --model: the folder of a checkpoint"):
        parse_config(flags)


def test_an_unknown_flag_is_refused_without_the_usage(capsys) -> None:
    assert main(["--model", "/m", "--frobnicate"]) == os.EX_CONFIG
    printed = capsys.readouterr().err
    assert printed == "FATAL InvalidConfig: unrecognized arguments: --frobnicate\n"


def test_flags_override_the_file(tmp_path) -> None:
    path = tmp_path / "engine.json"
    path.write_text('{"model": {"path": "/a"}, "scheduler": {"max_num_seqs": 3, "policy": "fcfs"}}')
    config, _ = parse_config(
        ["--config", str(path), "--max-num-seqs", "5", "--no-enable-prefix-caching"]
    )
    assert (config.model.path, config.scheduler.max_num_seqs, config.scheduler.policy) == (
        "/a",
        5,
        "fcfs",
    )
    assert not config.cache.enable_prefix_caching


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--max-model-len 0", r"model\.max_model_len must be at least 1, got 0"),
        ("--dtype int8", r"model\.dtype must be auto, float32, bfloat16 or float16, got 'int8'"),
        ("--block-size 0", r"cache\.block_size must be at least 1"),
        ("--num-blocks -3", r"cache\.num_blocks must be at least 1"),
        ("--kv-cache-memory-bytes 0", r"cache\.memory_bytes must be at least 1"),
        (
            "--gpu-memory-utilization 1.1",
            r"cache\.gpu_memory_utilization must be in \(0, 1\], got 1\.1",
        ),
        ("--gpu-memory-utilization nan", r"cache\.gpu_memory_utilization"),
        ("--num-redundant-experts -1", r"parallel\.num_redundant_experts must be at least 0"),
        ("--enable-expert-parallel", r"parallel\.coordinator must be host:port .*, got ''"),
        (
            "--enable-expert-parallel --coordinator host",
            r"parallel\.coordinator must be host:port .*, got 'host'",
        ),
        (
            "--enable-expert-parallel --coordinator :5560",
            r"parallel\.coordinator must be host:port",
        ),
        (
            "--enable-expert-parallel --coordinator host:0",
            r"parallel\.coordinator must be host:port",
        ),
        (
            "--enable-expert-parallel --coordinator host:99999",
            r"parallel\.coordinator must be host:port",
        ),
        ("--watermark 1", r"cache\.watermark must be in \[0, 1\)"),
        ("--swap-memory-bytes -1", r"cache\.swap_memory_bytes must be at least 0"),
        ("--max-num-batched-tokens 0", r"scheduler\.max_num_batched_tokens"),
        ("--max-num-seqs 0", r"scheduler\.max_num_seqs"),
        ("--max-queue 0", r"scheduler\.max_queue"),
        ("--scheduling-policy lifo", r"scheduler\.policy must be priority or fcfs, got 'lifo'"),
        (
            "--long-prefill-token-threshold -1",
            r"scheduler\.long_prefill_token_threshold must be at least 0",
        ),
        ("--preemption-mode drop", r"scheduler\.preemption_mode must be auto, recompute or swap"),
        ("--scheduler-class Fast", r"scheduler\.scheduler_class must be a qualified name"),
        ("--worker-class Fast", r"parallel\.worker_class must be a qualified name"),
        ("--tensor-parallel-size 0", r"parallel\.tensor_parallel_size must be at least 1"),
        ("--pipeline-parallel-size 0", r"parallel\.pipeline_parallel_size must be at least 1"),
        (
            "--kv-transport pigeon",
            r"kv_transfer\.transport must be ucx, tcp, shm, auto or nixl",
        ),
        (
            "--kv-rdma --kv-transport tcp",
            r"kv_transfer\.rdma needs transport ucx or auto, got 'tcp'",
        ),
        (
            "--kv-load-failure-policy hope",
            r"kv_transfer\.load_failure_policy must be recompute or fail",
        ),
        ("--kv-mode throw", r"kv_transfer\.mode must be pull or push"),
        ("--kv-max-inflight-bytes 0", r"kv_transfer\.max_inflight_bytes must be at least 1"),
        ("--kv-staging-bytes 0", r"kv_transfer\.staging_bytes must be at least 1"),
        ("--offload-memory-bytes -1", r"cache\.offload_memory_bytes must be at least 0"),
        ("--kv-load-timeout-s 0", r"kv_transfer\.load_timeout_s must be a positive number"),
        ("--kv-lease-s inf", r"kv_transfer\.lease_s must be a positive number"),
        ("--kv-port 70000", r"kv_transfer\.port must be in \[0, 65535\]"),
        ("--engine-port -1", r"engine_port must be in"),
        ("--http-port 65536", r"http_port must be in"),
        ("--drain-timeout-s nan", r"drain_timeout_s must be 0 or more seconds"),
        (
            "--compilation-mode fast",
            r"compilation\.mode must be auto, none, eager or inductor, got 'fast'",
        ),
        (
            "--cudagraph-mode some",
            r"compilation\.cudagraph_mode must be auto, none, piecewise, .* got 'some'",
        ),
        ("--device tpu", r"device must be auto, cpu or cuda, got 'tpu'"),
        (
            "--quantization int3",
            r"model\.quantization must be int8 or int4, or not given, got 'int3'",
        ),
        ("--num-threads 0", r"num_threads must be at least 1"),
        (
            "--no-enable-chunked-prefill --max-model-len 4096",
            r"max_num_batched_tokens is 512, but without chunked prefill",
        ),
    ],
)
def test_a_wrong_value_is_refused_with_its_field(flags, message) -> None:
    with pytest.raises(ConfigurationError, match=message):
        parse_config(["--model", "/m", *flags.split()])


@pytest.mark.parametrize(
    ("content", "message"), [(None, "cannot be read"), ("short", "at least 16 bytes, this one 5")]
)
def test_an_invalid_service_key_ends_the_engine_with_the_name_of_the_file(
    tmp_path, capsys, content, message
) -> None:
    path = tmp_path / "key"
    if content is not None:
        path.write_text(content)
    flags = ["--model", "/nowhere", "--executor", "some.Executor", "--service-key-file", str(path)]
    assert main(flags) == os.EX_CONFIG
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith(f"FATAL ServiceKeyInvalid: service_key_file {path}")
    assert message in last


def test_a_missing_model_is_fatal_before_the_engine_starts(capsys, monkeypatch, tmp_path) -> None:
    def start(*_: object) -> None:
        raise AssertionError("the engine was started")

    monkeypatch.setattr("baton_engine.cli._serve", start)
    assert main(["--model", str(tmp_path / "nowhere")]) == os.EX_CONFIG
    assert f"FATAL ModelNotFound: {tmp_path}/nowhere does not exist" in capsys.readouterr().err
    assert main(["--model", str(tmp_path)]) == os.EX_CONFIG
    assert f"FATAL ModelInvalid: {tmp_path}/config.json is missing" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags", ["--executor ray", "--executor some.Executor", "--worker-class some.Worker"]
)
def test_the_model_is_not_checked_when_other_code_reads_it(flags, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr("baton_engine.cli._serve", lambda config: 0)
    assert main(["--model", str(tmp_path / "nowhere"), *flags.split()]) == 0


def test_the_process_ends_with_its_exit_code_after_its_exit_handlers(tmp_path) -> None:
    """It waits for no thread. One exit handler removes temporary folders."""
    program = """
import sys, tempfile, threading
from baton_engine import cli
folder = tempfile.TemporaryDirectory(dir=sys.argv[1])
threading.Thread(target=threading.Event().wait).start()
cli.main = lambda: print("stopped", end="") or 3
cli.run()
"""
    ended = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert (ended.returncode, ended.stdout) == (3, "stopped"), ended.stderr
    assert not list(tmp_path.iterdir())
