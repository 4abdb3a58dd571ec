"""Expert-parallel groups under load scale, and lose ranks and the coordinator at random moments.

No request fails, every token is that of an undisturbed run up to near-ties, and all streams
continue within RECOVERY_S of a death.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
import torch

from baton_engine.random_checkpoint import create_checkpoint
from support.elastic.expert_group import SHAPE, VOCAB_SIZE, ExpertGroup
from support.load import Load, under_load
from support.parity import reference_model
from support.pods import Pod, pods
from support.waiting import eventually

pytestmark = pytest.mark.chaos
CYCLES = int(os.environ.get("BATON_CHAOS_CYCLES", "1"))
ROUNDS = int(os.environ.get("BATON_CHAOS_KILLS", "8"))
RECOVERY_S = 5.0
#: Time after which a kubelet kills a coordinator that does not respond.
LIVENESS_S = 2.0
#: Time for a restarted rank to import torch and load the model, beside 16 streams on two cores.
RESTART_S = 60.0


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return create_checkpoint(tmp_path_factory.mktemp("elastic") / "moe", "qwen3_moe", **SHAPE)


@pytest.fixture(scope="module")
def model(experts: Path) -> torch.nn.Module:
    return reference_model(experts)


def load_on(
    group: ExpertGroup, model: torch.nn.Module, width: int
) -> AbstractAsyncContextManager[Load]:
    url = f"http://{group.gateway.address}:8080"
    return under_load(url, model, width=width, vocab_size=VOCAB_SIZE, tails=group.tails)


async def wait_for_tokens(load: Load, since: float, what: str) -> None:
    """Wait until every open stream has received a token after `since`."""
    waiting = [stream for stream in load.streams if not stream.finished]

    def all_continue() -> bool:
        pending = [s for s in waiting if not s.finished and not s.error and s.times[-1] <= since]
        assert not pending, f"{len(pending)} of {len(waiting)} streams have no new token"
        return True

    timeout_s = since + RECOVERY_S - time.monotonic()
    await asyncio.to_thread(eventually, all_continue, f"{what}: new tokens", timeout_s)
    print(f"{what}: all streams continue after {time.monotonic() - since:.2f} s")


@pytest.mark.timeout(120 + 60 * CYCLES)
async def test_a_group_scales_under_load(
    experts: Path, model: torch.nn.Module, tmp_path: Path
) -> None:
    with pods(tmp_path, 31) as processes:
        group = ExpertGroup(processes, experts)
        await asyncio.to_thread(group.start, 2)
        rng = random.Random(1)
        async with load_on(group, model, width=32):
            for size in [4, 3, 6, 2] * CYCLES:
                names = sorted(group.ranks)
                if size < len(names):
                    names = rng.sample(names, size)  # any rank may leave
                names += [await asyncio.to_thread(group.add_rank) for _ in range(size - len(names))]
                await asyncio.to_thread(group.scale, names)


@pytest.mark.timeout(120 + 15 * ROUNDS)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=lambda how: how.name)
async def test_a_group_survives_deaths_at_random_moments(
    experts: Path, model: torch.nn.Module, tmp_path: Path, how: signal.Signals
) -> None:
    """A rank, the coordinator or both die, sometimes while the group scales."""
    with pods(tmp_path, 32 + (how is signal.SIGSTOP)) as processes:
        group = ExpertGroup(processes, experts, num_redundant_experts=2)
        await asyncio.to_thread(group.start, 3)
        rng = random.Random(2)
        members = sorted(group.ranks)
        async with load_on(group, model, width=16) as load:
            for round_ in range(ROUNDS):
                victims = rng.choice([["rank"], ["coordinator"], ["rank", "coordinator"]])
                if rng.random() < 0.5:  # during an operation
                    members = await change(group, members, rng)
                await asyncio.sleep(rng.uniform(0.0, 1.0))
                hit = [
                    group.coordinator if v == "coordinator" else group.ranks[rng.choice(members)]
                    for v in victims
                ]
                dead = set()
                if how is signal.SIGKILL:
                    dead = await asyncio.to_thread(group.instances, [pod.name for pod in hit])
                since = time.monotonic()
                for pod in hit:
                    pod.process.send_signal(how)
                what = f"round {round_}: {how.name} of {', '.join(pod.name for pod in hit)}"
                await asyncio.gather(wait_for_tokens(load, since, what), restart(hit, how))
                for pod in hit:
                    pod.process.send_signal(signal.SIGCONT)
                await asyncio.to_thread(group.wait_for, members, timeout_s=RESTART_S, dead=dead)


async def change(group: ExpertGroup, members: list[str], rng: random.Random) -> list[str]:
    """Request one rank more or less."""
    if len(members) > 2 and rng.random() < 0.5:
        members = rng.sample(members, len(members) - 1)
    else:
        members = [*members, await asyncio.to_thread(group.add_rank)]
    await asyncio.to_thread(group.put, members)
    return members


async def restart(hit: list[Pod], how: signal.Signals) -> None:
    """Act as a kubelet: restart killed pods, and kill a frozen coordinator by its liveness probe.

    Frozen ranks stay frozen until the group continues without them.
    """
    for pod in hit:
        if how is signal.SIGSTOP:
            if not pod.name.startswith("coordinator"):
                continue
            await asyncio.sleep(LIVENESS_S)
            pod.process.kill()
        await asyncio.to_thread(pod.process.wait)
        pod.restart()
