"""Steps with swaps, block copies, replaced tokens and grammars, and steps scheduled ahead.

Each must generate the same tokens as a request that runs alone without them.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from baton_engine.executor.step import (
    CachedRequestData,
    GrammarOutput,
    NewRequestData,
    SchedulerOutput,
)
from baton_engine.random_checkpoint import create_checkpoint
from baton_engine.worker.model_runner import ModelRunner
from baton_protocol.sampling_params import SamplingParams, StructuredOutput, StructuredOutputKind
from support.engine.step_driver import (
    GREEDY,
    VOCAB_SIZE,
    Request,
    StepDriver,
    make_runner,
    random_prompt,
)


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
    """A driver whose runner has no requests and whose KV memory is NaN."""
    _, kv = runner._ready()
    kv.cache.fill_(float("nan"))
    runner._input_batch.remove(list(runner._input_batch._row_of))
    return StepDriver(runner)


def generate_alone(
    driver: StepDriver, prompt: list[int], max_tokens: int, generated: list[int] | None = None
) -> list[int]:
    """Return the tokens of a request that runs alone; `generated` is how they begin."""
    request = Request("alone", prompt, max_tokens, generated=list(generated or []))
    driver.run([request])
    driver.step([], 1)
    return request.generated


def test_a_request_continues_with_the_same_tokens_after_swap_out_and_swap_in(
    driver: StepDriver,
) -> None:
    prompt = random_prompt(37)
    expected = generate_alone(driver, prompt, 16)
    swapped, other = Request("swapped", prompt, 16), Request("other", random_prompt(60, seed=1), 20)
    while len(swapped.generated) < 6:
        driver.step([swapped, other], 16)
    driver.swap_out(swapped)
    for _ in range(8):  # the other request overwrites its blocks
        driver.step([other], 16)
    driver.swap_in(swapped)
    while not swapped.done:
        driver.step([swapped], 16)
    assert swapped.generated == expected


def test_a_step_swaps_out_before_it_swaps_in(driver: StepDriver) -> None:
    """One request is swapped in to the blocks from which the other is swapped out."""
    prompts = {name: random_prompt(40, seed) for seed, name in enumerate(("first", "second"))}
    expected = {name: generate_alone(driver, prompt, 12) for name, prompt in prompts.items()}
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
def test_forks_share_the_tokens_before_the_fork_and_nothing_after_it(
    driver: StepDriver, num_generated: int
) -> None:
    """Forks happen inside a block and at its end. Then both get different tokens."""
    prompt = random_prompt(40)
    parent, child = Request("parent", prompt, 24), Request("child", [], 24)
    while len(parent.generated) < num_generated:
        driver.step([parent], 64)
    shared = list(parent.generated[:-1])
    driver.fork(parent, child)
    for request, token_id in ((parent, 400), (child, 401)):
        driver.replace_last_token(request, token_id)
    child.new_token_ids = []  # the child is new to the worker, so its tokens are sent anyway
    while not parent.done:
        driver.step([parent, child], 1)
    for request in (parent, child):
        driver.release(request)
    driver.step([], 1)
    assert parent.generated == generate_alone(driver, prompt, 24, [*shared, 400])
    assert child.generated == generate_alone(driver, prompt, 24, [*shared, 401])


def test_copy_on_write_of_blocks_does_not_change_the_tokens(driver: StepDriver) -> None:
    prompt = random_prompt(35)
    expected = generate_alone(driver, prompt, 20)
    request = Request("request", prompt, 20)
    while not request.done:
        driver.step([request], 10)
        driver.make_writable(request)
    assert request.generated == expected


def test_steps_scheduled_ahead_generate_the_same_tokens(driver: StepDriver) -> None:
    """The scheduler does not know the last token yet. The worker fills it in."""
    params = SamplingParams(temperature=0.8, seed=3, frequency_penalty=0.3)
    lengths = [5, 40, 17]
    runs = []
    for ahead in (False, True):
        requests = [
            Request(f"{ahead}-{n}", random_prompt(length, n), 12, params if n else GREEDY)
            for n, length in enumerate(lengths)
        ]
        (driver.run_ahead if ahead else driver.run)(requests)
        runs.append([request.generated for request in requests])
    assert runs[0] == runs[1]


def test_a_token_from_the_scheduler_replaces_the_one_that_the_worker_sampled(
    driver: StepDriver,
) -> None:
    prompt = random_prompt(20)
    request = Request("request", prompt, 9)
    while len(request.generated) < 4:
        driver.step([request], 64)
    driver.replace_last_token(request, 123)
    while not request.done:
        driver.step([request], 1)
    driver.release(request)
    driver.step([], 1)
    assert request.generated == generate_alone(driver, prompt, 9, request.generated[:4])


def test_a_beam_reports_twice_its_width_of_continuations_and_continues_with_the_best(
    driver: StepDriver,
) -> None:
    """The scheduler may replace the token later."""
    width = 3
    prompt = random_prompt(20)
    beam = Request("beam", prompt, 2, SamplingParams(temperature=0.0, beam_width=width))
    while not beam.generated:
        driver.step([beam], 64)
    (found,) = beam.logprobs
    assert len(found.top) >= 2 * width
    assert found.top[0][0] == beam.generated[0] == generate_alone(driver, prompt, 1)[0]


def test_a_grammar_restricts_only_its_own_request(driver: StepDriver) -> None:
    prompt = random_prompt(20)
    expected = generate_alone(driver, prompt, 2)
    allowed = next(token for token in range(100, 200) if token not in expected)
    bitmask = np.zeros((1, VOCAB_SIZE // 32), dtype=np.int32)
    bitmask[0, allowed // 32] = np.array(1 << allowed % 32, dtype=np.uint32).view(np.int32)
    structured = SamplingParams(
        temperature=0.0, structured_output=StructuredOutput(StructuredOutputKind.JSON_OBJECT)
    )
    bound, free = Request("bound", prompt, 2, structured), Request("free", prompt, 2)
    while not bound.generated:
        # The grammar's row belongs to the step that samples, which computes the last prompt token.
        samples = len(bound.prompt) - bound.num_computed <= 1
        driver.step([free, bound], 1, GrammarOutput(["bound"], bitmask) if samples else None)
    assert bound.generated == [allowed]
    assert free.generated == expected[: len(free.generated)]


def test_a_step_beyond_the_known_tokens_is_refused(runner: ModelRunner, driver: StepDriver) -> None:
    new = NewRequestData("early", random_prompt(4), [], GREEDY, 0, [0], 0)
    with pytest.raises(RuntimeError, match="early is to run up to position 5, but only 4"):
        runner.execute_model(SchedulerOutput([new], [], {"early": 5}, []))


def test_a_step_without_tokens_removes_finished_requests(
    runner: ModelRunner, driver: StepDriver
) -> None:
    request = Request("gone", random_prompt(4), 9)
    driver.step([request], 4)
    runner.execute_model(SchedulerOutput([], [], {}, ["gone"]))
    with pytest.raises(RuntimeError, match="gone"):
        runner.execute_model(
            SchedulerOutput([], [CachedRequestData("gone", [], 4)], {"gone": 1}, [])
        )


def test_a_step_reports_its_kv_as_written_before_it_has_ended(
    runner: ModelRunner, driver: StepDriver
) -> None:
    _, kv = runner._ready()
    seen: list[torch.Tensor] = []

    def kv_written() -> None:
        assert runner._in_flight is None, "the step goes on"
        seen.append(kv.cache.clone())

    new = NewRequestData("r", random_prompt(20), [], GREEDY, 0, [3, 1], 0)
    runner.execute_model(SchedulerOutput([new], [], {"r": 20}, []), kv_written)
    assert len(seen) == 1
    torch.testing.assert_close(seen[0], kv.cache, rtol=0, atol=0, equal_nan=True)
    assert not kv.cache[3].isnan().any()
    runner.execute_model(SchedulerOutput([], [], {}, ["r"]), kv_written)
    assert len(seen) == 1, "a step without tokens writes no KV"
