"""A worker runs the next step's forward before the tokens of a step are on the host."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from baton_engine.executor.base import Executor
from baton_engine.executor.multiproc.multiproc_executor import MultiprocExecutor
from baton_engine.executor.step import CachedRequestData, SchedulerOutput
from baton_engine.executor.uniproc import UniProcExecutor
from baton_engine.random_checkpoint import create_checkpoint
from support.engine.greedy_steps import (
    NUM_TOKENS,
    PROMPTS,
    WAIT_S,
    generate_in_one_process,
    make_step,
    model_config,
)

pytestmark = pytest.mark.usefixtures("_restore_sampled_tokens")


@pytest.mark.parametrize(
    ("executor_class", "tensor"),
    [(UniProcExecutor, 1), (MultiprocExecutor, 1), (MultiprocExecutor, 2)],
    ids=["one process", "one worker process", "two tensor ranks"],
)
def test_the_next_forward_runs_before_the_tokens_of_a_step_are_on_the_host(
    tmp_path: Path, executor_class: type[Executor], tensor: int
) -> None:
    checkpoint = create_checkpoint(tmp_path / "llama", "llama")
    expected = generate_in_one_process(model_config(checkpoint))["a"]
    config = model_config(checkpoint, tensor=tensor)
    worker = "support.engine.fake_gpu.DeferringWorker"
    config = msgspec.structs.replace(
        config, parallel=msgspec.structs.replace(config.parallel, worker_class=worker)
    )
    executor = executor_class(config, "instance", lambda: None)
    executor.initialize()
    executor.collective_rpc("hold_tokens")
    executor.execute_model(make_step("a", [], 0))
    tokens = []
    for step_id in range(1, NUM_TOKENS):
        pending = executor.sample_tokens(None)
        # The step does not carry its token, which the scheduler does not have yet.
        cached = CachedRequestData("a", [], len(PROMPTS["a"]) + step_id - 1)
        executor.execute_model(SchedulerOutput([], [cached], {"a": 1}, [], step_id=step_id))
        forwards = executor.collective_rpc("get_num_forwards", timeout_s=WAIT_S)
        assert set(forwards) == {step_id + 1}
        assert not pending.done()
        executor.collective_rpc("release_tokens")
        tokens.append(pending.result(WAIT_S).sampled_token_ids["a"])
    last = executor.sample_tokens(None)
    executor.collective_rpc("release_tokens")
    tokens.append(last.result(WAIT_S).sampled_token_ids["a"])
    executor.shutdown()
    assert tokens == expected
