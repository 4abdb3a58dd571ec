"""The life of an LLM: its arguments, progress bar, interrupts, threads, sleep and failures."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tqdm import tqdm

from baton_engine import LLM, SamplingParams
from baton_engine.core.engine_core import EngineCore
from baton_engine.llm.collectors import SamplesCollector
from baton_protocol.engine_messages import EngineCoreOutput
from support.engine.offline_llm import GREEDY, make_llm, metric


def test_the_import_of_the_package_does_not_import_torch() -> None:
    code = (
        "import sys, baton_engine; from baton_engine import SamplingParams; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_prompts_with_lower_priority_numbers_run_first(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[list[int]] = []
    push = SamplesCollector.push

    def record(self: SamplesCollector, output: EngineCoreOutput) -> bool:
        has_ended = push(self, output)
        if has_ended:
            ended.append(self.prompt.token_ids)
        return has_ended

    monkeypatch.setattr(SamplesCollector, "push", record)
    with make_llm(checkpoint, max_num_seqs=1) as llm:
        llm.generate([[1, 2], [3, 4], [5, 6]], GREEDY, priority=[2, 0, 1])
        assert ended == [[3, 4], [5, 6], [1, 2]]
        with pytest.raises(ValueError, match="got 1 for 2"):
            llm.generate([[1, 2], [3, 4]], GREEDY, priority=[2])
    with (
        make_llm(checkpoint, scheduling_policy="fcfs") as llm,
        pytest.raises(ValueError, match="priority has no effect"),
    ):
        llm.generate([[1, 2]], GREEDY, priority=[0])


def test_arguments_are_fields_of_the_engines_configuration(llm: LLM, checkpoint: Path) -> None:
    assert (llm.config.cache.num_blocks, llm.config.model.max_model_len) == (96, 512)
    with pytest.raises(TypeError, match=r"no argument 'num_block'; there are .*num_blocks"):
        make_llm(checkpoint, num_block=3)
    with pytest.raises(ValueError, match="max_num_seqs must be at least 1, got 0"):
        make_llm(checkpoint, max_num_seqs=0)
    with pytest.raises(ValueError, match="num_blocks"):
        make_llm(checkpoint, num_blocks="many")


def test_generate_on_a_closed_llm_is_an_error(checkpoint: Path) -> None:
    with make_llm(checkpoint) as llm:
        pass
    llm.close()
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate("hello")


def test_sleep_and_wake_up_do_not_change_the_output(llm: LLM) -> None:
    [before] = llm.generate("hello", GREEDY, use_tqdm=False)
    llm.sleep(1)
    with pytest.raises(RuntimeError, match="wake_up"):
        llm.generate("hello", GREEDY)
    llm.wake_up()
    [after] = llm.generate("hello", GREEDY, use_tqdm=False)
    assert after.outputs[0].token_ids == before.outputs[0].token_ids


def test_a_repeated_prompt_comes_from_the_prefix_cache(llm: LLM) -> None:
    llm.reset_prefix_cache()
    ids = [list(range(3, 50))]
    counts = [llm.generate(ids, GREEDY, use_tqdm=False)[0].num_cached_tokens for _ in range(2)]
    assert counts == [0, 32]


def test_the_progress_bar_counts_prompts_and_estimates_speed(
    llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    llm.generate(["a", "b", "c"], GREEDY)
    shown = capsys.readouterr().err
    assert "Processed prompts" in shown
    assert "3/3" in shown
    assert "toks/s, output: " in shown
    bars: list[tqdm] = []

    def make(**options) -> tqdm:
        bars.append(tqdm(**options, disable=True))
        return bars[0]

    llm.generate(["a", "b"], GREEDY, use_tqdm=make)
    assert len(bars) == 1


def test_ctrl_c_aborts_running_requests_and_the_llm_can_be_used_again(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = 0
    step = EngineCore.step

    def interrupted_step(core: EngineCore) -> list[EngineCoreOutput]:
        nonlocal steps
        steps += 1
        if steps == 3:
            signal.raise_signal(signal.SIGINT)
        return step(core)

    monkeypatch.setattr(llm._model.core, "step_fn", lambda: interrupted_step(llm._model.core))
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["hello"] * 4, SamplingParams(max_tokens=300, ignore_eos=True), use_tqdm=False)
    assert 3 <= steps < 10
    monkeypatch.undo()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert metric(llm, "baton:num_requests_running") == 0
    assert llm.generate("hello", GREEDY, use_tqdm=False)[0].finished


def test_generate_can_be_called_by_several_threads_at_once(llm: LLM) -> None:
    results: dict[int, list[int]] = {}

    def work(index: int) -> None:
        results[index] = llm.generate("hello", GREEDY, use_tqdm=False)[0].outputs[0].token_ids

    threads = [threading.Thread(target=work, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(results) == 3
    assert len({tuple(ids) for ids in results.values()}) == 1


def test_a_failed_engine_is_reported_and_refuses_later_calls(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make_llm(checkpoint) as llm:

        def fail() -> None:
            raise OSError("the device is on fire")

        monkeypatch.setattr(llm._model.core, "step_fn", fail)
        with pytest.raises(RuntimeError, match="the device is on fire"):
            llm.generate("hello", use_tqdm=False)
        with pytest.raises(RuntimeError, match=r"failed earlier .*fire.*make a new LLM"):
            llm.generate("hello", use_tqdm=False)
