"""The generator of a request drops what all its runs have."""

from __future__ import annotations

from typing import Any

import pytest

from baton_gateway.requests.generator import Generator
from baton_gateway.requests.job import Job
from support.gateway.gateway_rig import GatewayRig


async def test_the_logprobs_of_a_prompt_are_dropped_when_all_runs_have_them(
    rig: GatewayRig,
) -> None:
    await rig.start(rig.engine("d", "decode", "hello world"))
    jobs = []
    run = Generator.run

    def recorded(generator: Generator, job: Job, *args: Any) -> Any:
        jobs.append(job)
        return run(generator, job, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Generator, "run", recorded)
        body = {
            "model": "m",
            "prompt": "hello world",
            "n": 3,
            "max_tokens": 2,
            "prompt_logprobs": 1,
        }
        status, answer, _ = await rig.post("/v1/completions", body)
    assert status == 200
    assert all(choice["prompt_logprobs"] for choice in answer["choices"])
    assert [prompt.logprobs for prompt in jobs[0].prompts] == [[]]
