"""A decode engine that answers every request with the same tokens, for a discovery file.

python benchmarks/gateway/stub_engine.py DISCOVERY_FILE
"""

from __future__ import annotations

import asyncio
import sys
from collections import defaultdict
from pathlib import Path

import msgspec

from baton_protocol.engine_messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreResponseType,
)
from baton_protocol.options.config import EngineEndpoints
from support.gateway.fake_engine import FakeEngine

#: Seconds between two tokens of a request, as in an engine with 40 tokens per second and request.
STEP_S = 0.025


class SteppingEngine(FakeEngine):
    """Sends the first token at once, and then one message per step with a token of each request."""

    def __init__(self, name: str, role: str, answer: list[int]) -> None:
        super().__init__(name, role, answer)
        self._stepped = asyncio.Event()
        self._new: defaultdict[bytes, list[EngineCoreOutput]] = defaultdict(list)

    async def step(self) -> None:
        """Run steps. Does not return."""
        while True:
            await asyncio.sleep(STEP_S)
            self._stepped.set()
            self._stepped.clear()

    async def _next_step(self) -> None:
        await self._stepped.wait()

    def _output(self, peer: bytes, output: EngineCoreOutput) -> None:
        if not self._new:
            asyncio.get_running_loop().call_soon(self._send_new)
        self._new[peer].append(output)

    def _send_new(self) -> None:
        for peer, outputs in self._new.items():
            self._send(peer, EngineCoreResponseType.OUTPUTS, EngineCoreOutputs(outputs))
        self._new.clear()


async def main() -> None:
    engine = SteppingEngine("stub", "decode", [100] * 500)
    engine.max_model_len = 4096
    Path(sys.argv[1]).write_bytes(msgspec.json.encode(EngineEndpoints(engines=[engine.endpoint])))
    await engine.step()


if __name__ == "__main__":
    asyncio.run(main())
