"""Clients of expert-parallel ranks keep their requests and tokens while the group changes.

The tests start engines and a coordinator, and no gateway.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
import torch

from baton_engine.random_checkpoint import create_checkpoint
from baton_protocol.engine_client.engine_client import EngineClient
from baton_protocol.engine_messages import EngineCoreOutput, EngineCoreRequest, ErrorCode
from baton_protocol.options.config import ENGINE_HTTP_PORT, ENGINE_PORT
from baton_protocol.sampling_params import SamplingParams
from support.elastic.expert_group import ExpertGroup
from support.parity import assert_greedy, prompts, reference_model
from support.pods import Pods, pods

VOCAB_SIZE = 512
DEADLINE_S = 120.0
LONG = 200


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = {"num_experts": 8, "moe_intermediate_size": 32, "vocab_size": VOCAB_SIZE}
    return create_checkpoint(
        tmp_path_factory.mktemp("experts") / "model", "qwen3_moe", **shape, seed=3
    )


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> torch.nn.Module:
    return reference_model(checkpoint)


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Pods]:
    with pods(tmp_path, 31) as group:
        yield group


@asynccontextmanager
async def clients(group: ExpertGroup, names: list[str]) -> AsyncIterator[dict[str, EngineClient]]:
    async with AsyncExitStack() as stack:
        found = {}
        for name in names:
            client = EngineClient(group.ranks[name].address, ENGINE_PORT, client_id="test")
            await client.connect(DEADLINE_S)
            await client.wait_ready(DEADLINE_S)
            found[name] = await stack.enter_async_context(client)
        yield found


def request(request_id: str, prompt: list[int], length: int) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id, prompt, SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
    )


async def collect(stream: AsyncIterator[EngineCoreOutput]) -> list[EngineCoreOutput]:
    async with asyncio.timeout(DEADLINE_S):
        return [output async for output in stream]


def token_ids(outputs: list[EngineCoreOutput]) -> list[int]:
    for output in outputs:
        assert not output.error, output.error
    assert [output.token_offset for output in outputs] == list(range(len(outputs)))
    return [token_id for output in outputs for token_id in output.new_token_ids]


async def scale(group: ExpertGroup, names: list[str]) -> None:
    await asyncio.to_thread(group.put, names)
    await asyncio.to_thread(group.wait_for, names, timeout_s=DEADLINE_S)


async def test_running_requests_keep_their_rank_while_the_group_changes(
    checkpoint, model, processes
) -> None:
    group = ExpertGroup(processes, checkpoint, num_redundant_experts=2)
    names = [group.add_rank() for _ in range(3)]
    await scale(group, names[:2])
    asked = prompts(4, VOCAB_SIZE, longest=40, seed=1)
    async with clients(group, names[:2]) as ranks:
        staying, leaving = ranks[names[0]], ranks[names[1]]

        async def during(change: list[str], prompt: list[int], name: str) -> list[int]:
            stream = staying.add(request(name, prompt, LONG))
            outputs = [await anext(stream)]
            await scale(group, change)
            return token_ids(outputs + await collect(stream))

        answers = [await during(names, asked[0], "grows")]
        drained = leaving.add(request("r", asked[1], 4 * LONG))
        outputs = [await anext(drained)]
        answers.append(await during([names[0], names[2]], asked[1], "shrinks"))
        outputs += await collect(drained)
        assert outputs[-1].error_code is ErrorCode.DRAINING
        part = token_ids(outputs[:-1])
        stream = staying.add(request("recovers", asked[2], LONG))
        outputs = [await anext(stream)]
        group.ranks[names[2]].kill()
        answers.append(token_ids(outputs + await collect(stream)))
    assert_greedy(model, asked[:3], answers, "through three changes")
    assert_greedy(model, [asked[1]], [part], "drained")
    status, body = group.ranks[names[0]].get(ENGINE_HTTP_PORT, "/ready")
    generation = group.ranks[names[0]].metric("baton:topology_generation")
    assert (status, generation) == (200, group.topology().generation), body
    pauses = group.ranks[names[0]].metric("baton:topology_commit_pause_seconds_count")
    assert pauses == 4, "formed, grown, shrunk and recovered"


async def test_a_rank_of_two_workers_survives_the_death_of_another(
    checkpoint, model, processes
) -> None:
    group = ExpertGroup(processes, checkpoint, tensor_parallel_size=2)
    names = [group.add_rank() for _ in range(2)]
    await scale(group, names)
    asked = prompts(2, VOCAB_SIZE, longest=40, seed=2)
    async with clients(group, names) as ranks:
        streams = [
            client.add(request("r", prompt, LONG))
            for client, prompt in zip(ranks.values(), asked, strict=True)
        ]
        outputs = [[await anext(stream)] for stream in streams]
        group.ranks[names[1]].kill()
        outputs[0] += await collect(streams[0])
    assert_greedy(model, asked[:1], [token_ids(outputs[0])], "the survivor")
