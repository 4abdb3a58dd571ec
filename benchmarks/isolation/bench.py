"""Measures whether a client finds out which prompts another client has sent.

    make bench SUBJECT=isolation [ARGS="--probes 1000"]

method.md describes the attack. `--probes` below 1000 is a trial and writes no result.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from separation import auc

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from baton_engine.random_checkpoint import create_checkpoint
from baton_protocol.options.config import ENGINE_HTTP_PORT, GATEWAY_PORT, AccessConfig
from report import Goal, print_table, show, write
from support.pods import Pod, pods

NUM_PROBES = 1000
PROMPT_TOKENS = 512
SHAPE = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_layers": 4}
VICTIM, ATTACKER = "team-a", "team-b"
SEED = 5


class Client:
    """A client with an API key and one connection to a gateway."""

    def __init__(self, session: aiohttp.ClientSession, gateway: Pod, name: str) -> None:
        self._session = session
        self._url = f"http://{gateway.address}:{GATEWAY_PORT}/v1/completions"
        self._headers = {"Authorization": f"Bearer the-secret-key-of-{name}"}

    async def send(self, prompt: list[int]) -> tuple[float, int]:
        """Send a prompt.

        Returns:
            The seconds to the first token, and the cached tokens that the response reports.
        """
        body = {
            "prompt": prompt,
            "max_tokens": 2,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }
        began = time.perf_counter()
        async with self._session.post(self._url, json=body, headers=self._headers) as response:
            response.raise_for_status()
            await response.content.readline()
            first_s = time.perf_counter() - began
            rest = (await response.read()).decode().split("\n\n")
        usage = msgspec.json.decode(rest[-3].removeprefix("data: "))["usage"]
        return first_s, usage["prompt_tokens_details"]["cached_tokens"]


async def attack(gateway: Pod, num_probes: int) -> dict[str, Any]:
    """Probe the prompts of VICTIM as ATTACKER, and return the figures."""
    rng = random.Random(SEED)
    was_sent = [True, False] * (num_probes // 2)
    rng.shuffle(was_sent)

    def new_prompt() -> list[int]:
        return [rng.randrange(3, SHAPE["vocab_size"]) for _ in range(PROMPT_TOKENS)]

    times: dict[bool, list[float]] = {True: [], False: []}
    num_cached = num_failed = 0
    async with aiohttp.ClientSession() as session:
        victim, attacker = (Client(session, gateway, name) for name in (VICTIM, ATTACKER))
        for _ in range(10):  # warm up
            for client in (victim, attacker):
                await client.send(new_prompt())
        while was_sent:
            prompt, sent = new_prompt(), was_sent[-1]
            try:
                await victim.send(prompt)
                seconds, cached = await attacker.send(prompt if sent else new_prompt())
            except aiohttp.ClientResponseError:  # a busy machine: heartbeats were late
                num_failed += 1
                continue
            was_sent.pop()
            times[sent].append(seconds)
            num_cached += cached > 0
    return {
        "probes": num_probes,
        "auc": round(auc(times[True], times[False]), 3),
        "median_ms_sent": round(statistics.median(times[True]) * 1e3, 2),
        "median_ms_not_sent": round(statistics.median(times[False]) * 1e3, 2),
        "probes_with_cached_tokens": num_cached,
        "repeated_after_503": num_failed,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Isolation of clients in the prefix cache.")
    parser.add_argument("--probes", type=int, default=NUM_PROBES, help="an even number")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with (
        tempfile.TemporaryDirectory(prefix="baton-isolation-") as name,
        pods(Path(name), 42) as group,
    ):
        folder = Path(name)
        checkpoint = create_checkpoint(folder / "model", "llama", **SHAPE)
        keys = folder / "keys"
        keys.mkdir()
        for client in (VICTIM, ATTACKER):
            (keys / client).write_text(f"the-secret-key-of-{client}")
        service_key = folder / "service-key"
        service_key.write_text("5e" * 32)
        engine = group.engine("engine", checkpoint, service_key_file=str(service_key))
        gateways = {
            sharing: group.gateway(
                f"gateway-{sharing}",
                checkpoint,
                {engine: "decode"},
                service_key_file=str(service_key),
                access=AccessConfig(api_keys_dir=str(keys), cache_sharing=sharing),
            )
            for sharing in ("key", "service")
        }
        engine.wait_ready(ENGINE_HTTP_PORT)
        for sharing, gateway in gateways.items():
            gateway.wait_ready(GATEWAY_PORT)
            figures = asyncio.run(attack(gateway, args.probes))
            rows.append({"part": f"cacheSharing {sharing}", **figures})
    print_table(rows)
    isolated, shared = rows
    goals = [
        Goal(
            "AUC of an attack by time, cacheSharing key (0.5: no information)",
            0.5 + abs(isolated["auc"] - 0.5),
            0.55,
            "",
            at_most=True,
        ),
        Goal(
            "probes that find cached tokens, cacheSharing key",
            isolated["probes_with_cached_tokens"],
            0,
            "probes",
            at_most=True,
        ),
        Goal("AUC of the attack with cacheSharing service", shared["auc"], 0.95, ""),
    ]
    if args.probes < NUM_PROBES:
        show(goals)
    else:
        write("isolation", rows, goals, model=f"llama, {SHAPE}", prompt_tokens=PROMPT_TOKENS)


if __name__ == "__main__":
    main()
