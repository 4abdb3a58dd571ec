"""What a step may tell the runner besides whom to run: swaps, copies, other tokens, steps in flight. Results must not change."""

from __future__ import annotations

import random

import numpy as np
import pytest

from baton_engine.checkpoint import create_checkpoint
from baton_engine.executor.step import (
    CachedRequestData,
    GrammarOutput,
    NewRequestData,
    SchedulerOutput,
)
from baton_engine.worker.model_runner import ModelRunner
from baton_protocol.sampling import SamplingParams, StructuredOutput, StructuredOutputKind
from support.engine.step_driver import GREEDY, Request, StepDriver, make_runner

VOCAB_SIZE = 512


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    path = create_checkpoint(
        tmp_path_factory.mktemp("steps") / "llama",
        "llama",
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        vocab_size=VOCAB_SIZE,
        seed=7,
    )
    return make_runner(path)


@pytest.fixture
def driver(runner: ModelRunner) -> StepDriver:
    """Of a runner without requests, whose KV memory is NaN again."""
    _, kv = runner._ready()
    kv.cache.fill_(float("nan"))
    runner._input_batch.remove(list(runner._input_batch._row_of))
    return StepDriver(runner)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, VOCAB_SIZE) for _ in range(length)]


def alone(
    driver: StepDriver, prompt: list[int], max_tokens: int, generated: list[int] | None = None
) -> list[int]:
    """What a request of its own generates, undisturbed."""
    request = Request("alone", prompt, max_tokens, generated=list(generated or []))
    driver.run([request])
    driver.step([], 1)
    return request.generated


def test_swapped_request_goes_on_where_it_was(driver: StepDriver) -> None:
    prompt = prompt_of(37)
    expected = alone(driver, prompt, 16)
    swapped, other = Request("swapped", prompt, 16), Request("other", prompt_of(60, seed=1), 20)
    while len(swapped.generated) < 6:
        driver.step([swapped, other], 16)
    driver.swap_out(swapped)
    for _ in range(8):  # others take the blocks it left
        driver.step([other], 16)
    driver.swap_in(swapped)
    while not swapped.done:
        driver.step([swapped], 16)
    assert swapped.generated == expected


def test_requests_change_places_in_one_step(driver: StepDriver) -> None:
    """One goes out and one comes in, into the very blocks that the first left: out happens before in."""
    prompts = {name: prompt_of(40, seed) for seed, name in enumerate(("first", "second"))}
    expected = {name: alone(driver, prompt, 12) for name, prompt in prompts.items()}
    first, second = (Request(name, prompt, 12) for name, prompt in prompts.items())
    for request in (first, second):
        while len(request.generated) < 3:
            driver.step([request], 64)
    driver.swap_out(first)
    driver.step([second], 1)
    assert len(first.host_block_ids) == len(second.block_ids)
    driver.free_blocks.clear()
    driver.swap_out(second)
    driver.swap_in(first)
    driver.free_blocks += range(200, 256)
    while not first.done:
        driver.step([first], 1)
    driver.swap_in(second)
    while not second.done:
        driver.step([second], 1)
    assert {"first": first.generated, "second": second.generated} == expected


@pytest.mark.parametrize("num_generated", [1, 7, 8, 9])
def test_forks_share_a_past_and_nothing_else(driver: StepDriver, num_generated: int) -> None:
    """Fork in the middle of a block and at its edge; each goes another way from its last token on."""
    prompt = prompt_of(40)
    parent, child = Request("parent", prompt, 24), Request("child", [], 24)
    while len(parent.generated) < num_generated:
        driver.step([parent], 64)
    past = list(parent.generated[:-1])
    driver.fork(parent, child)
    for request, token_id in ((parent, 400), (child, 401)):
        driver.replace_last_token(request, token_id)
    child.new_token_ids = []  # the worker meets it with this token
    while not parent.done:
        driver.step([parent, child], 1)
    for request in (parent, child):
        driver.release(request)
    driver.step([], 1)
    assert parent.generated == alone(driver, prompt, 24, [*past, 400])
    assert child.generated == alone(driver, prompt, 24, [*past, 401])


def test_request_gets_blocks_of_its_own_while_it_runs(driver: StepDriver) -> None:
    prompt = prompt_of(35)
    expected = alone(driver, prompt, 20)
    request = Request("request", prompt, 20)
    while not request.done:
        driver.step([request], 10)
        driver.make_writable(request)
    assert request.generated == expected


def test_steps_scheduled_ahead_change_nothing(driver: StepDriver) -> None:
    """The scheduler does not know the last token when it schedules the next step; the worker does when it runs it."""
    params = SamplingParams(temperature=0.8, seed=3, frequency_penalty=0.3)
    lengths = [5, 40, 17]
    runs = []
    for ahead in (False, True):
        requests = [
            Request(f"{ahead}-{n}", prompt_of(length, n), 12, params if n else GREEDY)
            for n, length in enumerate(lengths)
        ]
        (driver.run_ahead if ahead else driver.run)(requests)
        runs.append([request.generated for request in requests])
    assert runs[0] == runs[1]


def test_tokens_of_the_scheduler_come_before_those_of_the_worker(driver: StepDriver) -> None:
    prompt = prompt_of(20)
    request = Request("request", prompt, 9)
    while len(request.generated) < 4:
        driver.step([request], 64)
    driver.replace_last_token(request, 123)
    while not request.done:
        driver.step([request], 1)
    driver.release(request)
    driver.step([], 1)
    assert request.generated == alone(driver, prompt, 9, request.generated[:4])


def test_beams_report_their_best_continuations(driver: StepDriver) -> None:
    """The scheduler chooses among them; until it does, the worker goes on with the best."""
    width = 3
    prompt = prompt_of(20)
    beam = Request("beam", prompt, 2, SamplingParams(temperature=0.0, beam_width=width))
    while not beam.generated:
        driver.step([beam], 64)
    (found,) = beam.logprobs
    assert len(found.top) >= 2 * width
    assert found.top[0][0] == beam.generated[0] == alone(driver, prompt, 1)[0]


def test_grammar_binds_its_requests_and_no_others(driver: StepDriver) -> None:
    prompt = prompt_of(20)
    expected = alone(driver, prompt, 2)
    allowed = next(token for token in range(100, 200) if token not in expected)
    bitmask = np.zeros((1, VOCAB_SIZE // 32), dtype=np.int32)
    bitmask[0, allowed // 32] = np.array(1 << allowed % 32, dtype=np.uint32).view(np.int32)
    structured = SamplingParams(
        temperature=0.0, structured_output=StructuredOutput(StructuredOutputKind.JSON_OBJECT)
    )
    bound, free = Request("bound", prompt, 2, structured), Request("free", prompt, 2)
    while not bound.generated:
        # Chunks are drawn: the grammar's row is there in the step that samples.
        samples = len(bound.prompt) - bound.num_computed <= 1
        driver.step([free, bound], 1, GrammarOutput(["bound"], bitmask) if samples else None)
    assert bound.generated == [allowed]
    assert free.generated == expected[: len(free.generated)]


def test_step_of_tokens_that_nobody_knows_is_refused(
    runner: ModelRunner, driver: StepDriver
) -> None:
    new = NewRequestData("early", prompt_of(4), [], GREEDY, 0, [0], 0)
    with pytest.raises(RuntimeError, match="early is to run up to position 5, but only 4"):
        runner.execute_model(SchedulerOutput([new], [], {"early": 5}, []))


def test_step_without_tokens_still_forgets(runner: ModelRunner, driver: StepDriver) -> None:
    request = Request("gone", prompt_of(4), 9)
    driver.step([request], 4)
    runner.execute_model(SchedulerOutput([], [], {}, ["gone"]))
    with pytest.raises(RuntimeError, match="gone"):
        runner.execute_model(
            SchedulerOutput([], [CachedRequestData("gone", [], 4)], {"gone": 1}, [])
        )
