"""Script of one rank under torchrun: run a scenario, and write results to RESULTS/<rank>.json.

For the tests of the external launcher.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import msgspec

from baton_engine.executor.base import Executor, executor_name, load_executor_class
from baton_protocol.options.config import EngineConfig
from support.engine.fake_workers import engine_config, step
from support.engine.greedy_steps import generate, model_config


def start(config: EngineConfig) -> Executor:
    executor = load_executor_class(executor_name(config))(config, "instance", lambda: None)
    info = executor.initialize()
    assert executor.max_concurrent_batches == 1
    results["num_blocks"] = info.num_blocks
    return executor


def error_of(executor: Executor, method: str, *args: Any) -> list[str]:
    try:
        executor.collective_rpc(method, args)
        return []
    except Exception as error:
        return [type(error).__name__, str(error)]


def fake(tensor: str, pipeline: str, service_key_file: str = "") -> None:
    config = engine_config(tensor=int(tensor), pipeline=int(pipeline), executor="external_launcher")
    config = msgspec.structs.replace(config, service_key_file=service_key_file)
    executor = start(config)
    outputs = []
    for number in range(4):
        executor.execute_model(step(number))
        outputs.append(executor.sample_tokens(None).result().sampled_token_ids["r"])
    results["outputs"] = outputs
    results["ranks"] = [rank for rank, _ in executor.collective_rpc("who")]
    results["error"] = error_of(executor, "raise_on", 1)
    executor.shutdown()


def real(checkpoint: str) -> None:
    """Run two executors one after the other in the same process."""
    for tensor, pipeline in ((2, 1), (1, 2)):
        executor = start(model_config(Path(checkpoint), tensor, pipeline, "external_launcher"))
        results[f"tokens of {tensor} x {pipeline}"] = generate(executor)
        executor.shutdown()


if __name__ == "__main__":
    results: dict[str, Any] = {}
    {"fake": fake, "real": real}[sys.argv[2]](*sys.argv[3:])
    Path(sys.argv[1], f"{os.environ['RANK']}.json").write_text(json.dumps(results))
