"""Run `baton-model fetch` as a process. For the tests of the model fetcher."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

WEIGHTS = random.Random(7).randbytes(300_000)
#: More than two of huggingface_hub's chunks of 10 MiB.
LARGE_WEIGHTS = random.Random(8).randbytes(24 * 2**20)

MODEL_FILES = {
    "config.json": b'{"architectures": ["X"]}',
    "tokenizer.json": b'{"model": {}}',
    "tokenizer_config.json": b"{}",
    "model-00001-of-00002.safetensors": WEIGHTS,
    "model-00002-of-00002.safetensors": WEIGHTS[::-1],
    "model.safetensors.index.json": b'{"weight_map": {}}',
    "pytorch_model.bin": b"a pickle",
    "training_args.bin": b"another",
    "modeling_custom.py": b"import os",
    "README.md": b"# hello",
}
TAKEN = {name for name in MODEL_FILES if name.endswith((".json", ".safetensors"))}


def start(uri: str, target: Path, *flags: str, **env: str) -> subprocess.Popen[str]:
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("AWS_", "HF_")) and "proxy" not in name.lower()
    }
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "baton_engine.fetch.command",
            "fetch",
            "--uri",
            uri,
            "--to",
            str(target),
            *flags,
        ],
        env={**inherited, "HF_HOME": str(target.parent / "hf"), **env},
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str], timeout_s: float = 90.0) -> tuple[int, str]:
    """Wait for the end of the fetcher. Return the exit code and stderr.

    Raises:
        AssertionError: the fetcher did not end within `timeout_s` and was killed.
    """
    try:
        _, stderr = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        _, stderr = process.communicate()
        raise AssertionError(f"the fetcher did not end within {timeout_s:g} s:\n{stderr}") from None
    return process.returncode, stderr


def run(uri: str, target: Path, *flags: str, **env: str) -> tuple[int, str]:
    return finish(start(uri, target, *flags, **env))


def last_line(stderr: str) -> str:
    return stderr.strip().splitlines()[-1]


def left_behind(target: Path) -> set[str]:
    """Return the names beside `target`, except its lock and the cache of `huggingface_hub`."""
    return {path.name for path in target.parent.iterdir()} - {
        target.name,
        f"{target.name}.lock",
        "hf",
    }
