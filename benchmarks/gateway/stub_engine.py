"""A decode engine that answers every request with the same tokens, for a discovery file.

python benchmarks/gateway/stub_engine.py DISCOVERY_FILE
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import msgspec

from baton_protocol.config import EngineEndpoints
from support.gateway.fake_engine import FakeEngine


async def main() -> None:
    engine = FakeEngine("stub", "decode", [100] * 500)
    engine.max_model_len = 4096
    Path(sys.argv[1]).write_bytes(msgspec.json.encode(EngineEndpoints(engines=[engine.endpoint])))
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
