"""A pause, a sleep, a failed sleep and a stall of one of two decode engines under 64 streams.

No request fails, all tokens are right, and the engine gets no new request.
"""

from __future__ import annotations

import asyncio
import os
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from transformers import PreTrainedModel

from baton_protocol.options.config import (
    ENGINE_HTTP_PORT,
    GATEWAY_METRICS_PORT,
    GATEWAY_PORT,
    ParallelConfig,
)
from support.chaos import workers
from support.completions import VOCAB, complete
from support.parity import assert_greedy, prompts, reference_model
from support.pods import Pod, pods
from support.waiting import until

pytestmark = pytest.mark.chaos

NUM_STREAMS, NUM_LATER, NUM_TOKENS = 64, 16, 400
STALL_TIMEOUT_S = 3.0
WORKER = "baton_engine.executor.multiproc.worker_main"
WORKER_CLASS = f"{workers.__name__}.{workers.WorkerThatKeepsWeights.__name__}"


@dataclass
class Service:
    victim: Pod
    gateway: Pod
    reference: PreTrainedModel

    @property
    def url(self) -> str:
        return f"http://{self.gateway.address}:{GATEWAY_PORT}/v1"

    def num_decode_engines(self) -> float:
        _, body = self.gateway.get(GATEWAY_METRICS_PORT, "/metrics")
        [line] = [
            line
            for line in body.splitlines()
            if line.startswith("baton:engines_ready{") and 'role="decode"' in line
        ]
        return float(line.split()[-1])

    def inject(self, fault: str) -> None:
        if fault == "stall":
            self._worker().suspend()
        elif fault == "failed sleep":
            with pytest.raises(urllib.error.HTTPError):
                self._post("/sleep?level=2&mode=keep")
        else:
            self._post("/pause?mode=keep" if fault == "pause" else "/sleep?level=1&mode=keep")

    def mend(self, fault: str) -> None:
        if fault == "stall":
            self._worker().resume()
        else:
            self._post("/wake_up" if fault == "sleep" else "/resume")

    def _post(self, path: str) -> None:
        url = f"http://{self.victim.address}:{ENGINE_HTTP_PORT}{path}"
        with urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=60):
            pass

    def _worker(self) -> psutil.Process:
        children = psutil.Process(self.victim.process.pid).children(recursive=True)
        [worker] = [child for child in children if WORKER in child.cmdline()]
        return worker


@pytest.fixture
def service(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    tests = str(Path(__file__).parents[1])
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join(filter(None, (tests, os.environ.get("PYTHONPATH"))))
    )
    with pods(tmp_path, 30) as group:
        parallel = ParallelConfig(executor_class="multiproc", worker_class=WORKER_CLASS)
        engines = [group.engine(name, checkpoint, parallel=parallel) for name in ("d0", "d1")]
        roles = dict.fromkeys(engines, "decode")
        gateway = group.gateway("gateway", checkpoint, roles, stall_timeout_s=STALL_TIMEOUT_S)
        for pod in engines:
            pod.wait_ready(ENGINE_HTTP_PORT)
        gateway.wait_ready(GATEWAY_PORT)
        yield Service(engines[0], gateway, reference_model(checkpoint))


@pytest.mark.parametrize("fault", ["pause", "sleep", "failed sleep", "stall"])
async def test_streams_survive_a_stuck_engine_which_gets_no_request(
    service: Service, fault: str
) -> None:
    victim = service.victim
    asked = prompts(NUM_STREAMS + NUM_LATER, VOCAB, longest=60)
    await until(lambda: service.num_decode_engines() == 2, "both engines at the gateway")
    running = [
        asyncio.create_task(complete(service.url, prompt, NUM_TOKENS))
        for prompt in asked[:NUM_STREAMS]
    ]
    await until(
        lambda: victim.metric("baton:generation_tokens_total") > 10 * NUM_STREAMS,
        "tokens of the victim",
    )
    service.inject(fault)
    if fault != "stall":
        await until(lambda: service.num_decode_engines() == 1, "the victim out of the rotation")
        assert victim.get(ENGINE_HTTP_PORT, "/ready")[0] == 503
    async with asyncio.timeout(120):
        outputs = await asyncio.gather(*running)
        computed = victim.metric("baton:prompt_tokens_computed_total")
        outputs += await asyncio.gather(
            *(complete(service.url, prompt, NUM_TOKENS) for prompt in asked[NUM_STREAMS:])
        )
    assert_greedy(service.reference, asked, outputs, fault)
    assert service.gateway.metric("baton:requests_resumed_total", GATEWAY_METRICS_PORT) > 0
    service.mend(fault)
    await until(lambda: service.num_decode_engines() == 2, "the victim in the rotation again")
    await until(lambda: victim.get(ENGINE_HTTP_PORT, "/ready")[0] == 200, "the victim ready")
    await until(
        lambda: (
            victim.metric("baton:num_requests_running")
            + victim.metric("baton:num_requests_waiting")
            == 0
        ),
        "the moved requests aborted at the victim",
    )
    assert victim.metric("baton:prompt_tokens_computed_total") == computed, "it got a request"
    more = prompts(8, VOCAB, longest=60, seed=9)

    async def victim_is_used() -> bool:
        """Send requests. The gateway prefers the other engine until the victim's next PONG."""
        outputs = await asyncio.gather(*(complete(service.url, prompt, 20) for prompt in more))
        assert_greedy(service.reference, more, outputs, "after the fault")
        return victim.metric("baton:prompt_tokens_computed_total") > computed

    await until(victim_is_used, "requests at the victim again")
