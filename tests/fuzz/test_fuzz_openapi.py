"""Schemathesis sends random requests of `/openapi.json`. The responses agree with the document."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from baton_gateway.endpoints.openapi.operations import OPERATIONS
from baton_protocol.pooling_params import Task
from baton_text.tokenizer import Tokenizer
from support.fuzz.fuzz_target import NUM_CASES, SEED, TIMEOUT_S
from support.gateway.gateway_rig import GatewayRig

pytestmark = pytest.mark.timeout(TIMEOUT_S)
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "unsupported_method",
)


@pytest.mark.parametrize("task", Task)
async def test_responses_agree_with_the_document(
    checkpoint: Path, tmp_path: Path, task: Task
) -> None:
    """Endpoints of another task return 400, as the document says."""
    rig = GatewayRig(tmp_path, Tokenizer.from_folder(checkpoint))
    try:
        engine = rig.engine("d", "decode")
        engine.pool(task)
        await rig.start(engine)
        output = await run_schemathesis(
            tmp_path,
            f"{rig.url}/openapi.json",
            f"--checks={','.join(CHECKS)}",
            f"--max-examples={max(1, NUM_CASES // len(OPERATIONS) // len(Task))}",
            f"--seed={SEED}",
            "--phases=examples,coverage,fuzzing",
            "--continue-on-failure",
            "--generation-database=none",
            "--suppress-health-check=all",
            f"--request-timeout={TIMEOUT_S:g}",
            "--no-color",
        )
        print(output)
        for (method, path), operation in OPERATIONS.items():
            if operation.body is not None and (not operation.tasks or task in operation.tasks):
                succeeded = rig.metric("baton:http_requests_total", endpoint=path, status="200")
                assert succeeded, f"no {method} {path} was valid\n{output}"
    finally:
        await rig.close()


async def run_schemathesis(folder: Path, *arguments: str) -> str:
    """Run Schemathesis in `folder`. Return its output, which must report no failure."""
    process = await asyncio.create_subprocess_exec(
        Path(sys.executable).with_name("schemathesis"),
        "run",
        *arguments,
        cwd=folder,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        output = (await process.communicate())[0].decode()
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0, output
    return output
