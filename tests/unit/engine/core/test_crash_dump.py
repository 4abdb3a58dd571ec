"""The content of a crash dump."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from baton_engine.core.crash_dump import write_crash_dump
from baton_engine.executor.step import CachedRequestData, NewRequestData, SchedulerOutput
from baton_protocol.options.config import EngineConfig, ModelConfig, ObservabilityConfig
from baton_protocol.sampling_params import SamplingParams, StructuredOutput, StructuredOutputKind


@pytest.mark.parametrize("num_repeats", [1, 100])
def test_a_crash_dump_contains_nothing_that_clients_wrote(tmp_path: Path, num_repeats: int) -> None:
    """This also holds for short lists."""
    secret = 7654321
    ids, text = [secret] * num_repeats, "my confidential schema"
    params = SamplingParams(
        stop_token_ids=ids,
        logit_bias={secret: 1.0},
        allowed_token_ids=ids,
        bad_words_token_ids=[ids],
        structured_output=StructuredOutput(StructuredOutputKind.JSON, text * num_repeats),
    )
    new = NewRequestData("r", ids, ids, params, 0, [3], 0)
    known = CachedRequestData("s", [4], 0, new_token_ids=ids)
    step = SchedulerOutput([new], [known], {"r": num_repeats}, [], step_id=5)
    config = EngineConfig(
        model=ModelConfig("/m"), observability=ObservabilityConfig(crash_dump_dir=str(tmp_path))
    )
    path = write_crash_dump(config, step, None, RuntimeError("the device is on fire"))
    assert path is not None
    dump = path.read_text()
    assert str(secret) not in dump
    assert text not in dump
    described = json.loads(dump)["step"]["new_requests"][0]
    assert described["prompt_token_ids"] == f"{num_repeats} left out"
    assert (described["request_id"], described["block_ids"]) == ("r", [3])
    assert described["sampling_params"]["structured_output"]["kind"] == "JSON"
