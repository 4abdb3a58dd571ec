"""A gateway with one engine that pools prompts."""

from __future__ import annotations

from typing import Any

from baton_protocol.pooling_params import Task
from support.gateway.gateway_rig import GatewayRig, MakeRig


async def start(make_rig: MakeRig, task: Task, **config: Any) -> GatewayRig:
    rig = make_rig(**config)
    engine = rig.engine("d", "decode")
    engine.max_model_len = 1024
    engine.pool(task)
    await rig.start(engine)
    return rig
