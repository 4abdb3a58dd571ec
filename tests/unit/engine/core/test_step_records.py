"""The records of a step: the crash dump of a failed step, and the log of iterations."""

from __future__ import annotations

import json
import logging
import re
import socket
import stat

import pytest

from baton_engine.core.step_records import StepFailedError
from baton_protocol.engine_messages import EngineCoreRequest
from baton_protocol.options.config import (
    ObservabilityConfig,
    SchedulerConfig,
)
from baton_protocol.sampling_params import SamplingParams
from support.engine.core_rig import generate, make_core, request


def test_a_failed_step_writes_its_input_to_a_file(tmp_path) -> None:
    core = make_core(observability=ObservabilityConfig(crash_dump_dir=str(tmp_path / "dumps")))
    generate(core, request("before", [1, 2], 2))
    long = EngineCoreRequest("long", list(range(1, 101)), SamplingParams(max_tokens=2))
    core.add_request(long)
    core.add_request(request("bad", [13, 13, 13]))
    with pytest.raises(
        StepFailedError, match="RuntimeError: the device is on fire; the crash dump is"
    ) as failed:
        core.step_fn()
    (path,) = (tmp_path / "dumps").iterdir()
    assert socket.gethostname() in path.name, "pods that share the folder would use equal names"
    assert str(path) in str(failed.value)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    dump = json.loads(path.read_text())
    assert dump["error"][-1] == "RuntimeError: the device is on fire"
    assert dump["step"]["num_scheduled_tokens"] == {"long": 100, "bad": 3}
    new = {one["request_id"]: one for one in dump["step"]["new_requests"]}
    assert new["bad"]["prompt_token_ids"] == "3 left out"
    assert new["long"]["prompt_token_ids"] == "100 left out"
    assert new["bad"]["sampling_params"]["max_tokens"] == 6
    assert dump["stats"]["num_requests_running"] == 2
    assert dump["config"]["cache"]["num_blocks"] == 64


def test_a_crash_dump_is_written_to_the_volume_of_a_pod_of_the_local_cluster(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv("POCKETKUBE_POD_ROOT", str(tmp_path))
    (tmp_path / "dumps").mkdir()
    core = make_core(observability=ObservabilityConfig(crash_dump_dir="/dumps"))
    core.add_request(request("bad", [13, 13, 13]))
    with pytest.raises(StepFailedError, match="the crash dump is"):
        core.step_fn()
    assert len(list((tmp_path / "dumps").iterdir())) == 1


def test_a_scheduling_failure_writes_the_engine_state_to_a_file(tmp_path, monkeypatch) -> None:
    core = make_core(observability=ObservabilityConfig(crash_dump_dir=str(tmp_path)))
    core.add_request(request("r", [1, 2]))
    monkeypatch.setattr(core.scheduler.state.kv, "allocate", lambda *args, **options: 1 / 0)
    with pytest.raises(
        StepFailedError, match=r"scheduling failed: ZeroDivisionError: .*; the crash dump is"
    ):
        core.step_fn()
    (path,) = tmp_path.iterdir()
    dump = json.loads(path.read_text())
    assert dump["step"] is None
    assert dump["stats"]["num_requests_waiting"] == 1


def test_a_failed_crash_dump_does_not_hide_the_error_of_the_step(tmp_path) -> None:
    (tmp_path / "file").touch()
    core = make_core(observability=ObservabilityConfig(crash_dump_dir=str(tmp_path / "file")))
    core.add_request(request("bad", [13, 13, 13]))
    with pytest.raises(StepFailedError, match=r"the device is on fire$"):
        core.step_fn()


def test_iterations_are_logged_on_request(caplog) -> None:
    with caplog.at_level(logging.INFO):
        generate(
            make_core(observability=ObservabilityConfig(log_iterations=True)),
            request("r", [1, 2, 3], 2),
        )
    lines = [
        record.getMessage() for record in caplog.records if record.getMessage().startswith("step ")
    ]
    assert re.search(
        r"3 prefill tokens of 1 requests, 0 decode tokens; 1 running, 0 waiting, .*model \d",
        lines[0],
    )
    assert "0 prefill tokens of 0 requests, 1 decode tokens" in lines[1]


def test_the_last_chunk_of_a_prompt_is_logged_as_a_prefill_even_with_one_token(caplog) -> None:
    with caplog.at_level(logging.INFO):
        generate(
            make_core(
                observability=ObservabilityConfig(log_iterations=True),
                scheduler=SchedulerConfig(max_num_batched_tokens=2, max_num_seqs=2),
            ),
            request("r", [1, 2, 3], 2),
        )
    assert re.findall(r"(\d+) prefill tokens of (\d+) requests, (\d+) decode", caplog.text) == [
        ("2", "1", "0"),
        ("1", "1", "0"),
        ("0", "0", "1"),
    ]
