"""Runs the programs of tests/clients with the packages that `make clients` installs."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
PROGRAMS = ROOT / "tests/clients/programs"
INSTALLED = ROOT / ".clients"
PYTHON = INSTALLED / "venv/bin/python"
DEADLINE_S = 200.0


def are_installed() -> bool:
    return (INSTALLED / "installed").exists()


async def run_program(name: str, *arguments: str) -> Any:
    """Run a program, and return the JSON document that is its last line of output."""
    command = [str(PYTHON), str(PROGRAMS / "python" / name)]
    if name.endswith(".mjs"):
        # Node looks for packages in the folders above the program.
        for each in (PROGRAMS / "node").iterdir():
            shutil.copy(each, INSTALLED)
        command = ["node", str(INSTALLED / name)]
    environment = {
        "PATH": os.environ["PATH"],
        # Otherwise LiteLLM downloads the prices of models.
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    process = await asyncio.create_subprocess_exec(
        *command,
        *arguments,
        env=environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(DEADLINE_S):
            output, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, f"{name} {' '.join(arguments)}:\n{errors.decode()}"
    return json.loads(output.splitlines()[-1])
