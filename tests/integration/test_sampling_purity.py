"""Sampled tokens depend only on the prompt, the parameters and the seed, not on the engine."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from baton_engine import LLM, SamplingParams, StructuredOutputsParams
from baton_engine.core.engine_core import EngineCore
from baton_engine.executor.base import executor_name, load_executor_class
from baton_engine.llm.engine_args import EngineArgs, engine_config
from baton_engine.random_checkpoint import create_checkpoint
from baton_protocol.engine_messages import EngineCoreRequest
from baton_text.reply_parsing.reasoning import REASONING_FORMATS
from baton_text.reply_parsing.reply_grammar import ReplyGrammar
from baton_text.tokenizer import Tokenizer
from support.parity import prompts

NUM_TOKENS = 24
BUDGET = 6
#: The grammar of a reply whose reasoning the prompt has begun.
THINKING = ReplyGrammar(
    REASONING_FORMATS["think"],
    is_reasoning=True,
    thinking_budget=BUDGET,
    special_token_id=lambda _: None,
).text(None)
PARAMS = [
    SamplingParams(seed=seed, max_tokens=NUM_TOKENS, ignore_eos=True, **options)
    for seed, options in enumerate(
        (
            {},
            {"temperature": 0.7, "top_p": 0.9},
            {"temperature": 1.5, "top_k": 20},
            {"min_p": 0.05, "repetition_penalty": 1.2},
            {"presence_penalty": 0.7, "frequency_penalty": 0.4},
            {"n": 3},
            {"n": 2, "best_of": 4, "top_p": 0.8},
            {"logit_bias": {7: 3.0, 9: -5.0}, "min_tokens": 8},
            {"logprobs": 2, "prompt_logprobs": 1},
            {"structured_outputs": StructuredOutputsParams(regex="[a-z ]{40}")},
            {"structured_outputs": StructuredOutputsParams(grammar=THINKING)},
        )
    )
]
PROMPTS = prompts(len(PARAMS), 512, longest=70)
Tokens = list[list[list[int]]]  # per prompt and sample


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("purity") / "tiny"
    return create_checkpoint(
        path, "qwen3", hidden_size=64, intermediate_size=96, num_layers=2, vocab_size=512, seed=3
    )


@pytest.fixture(scope="module")
def alone(checkpoint: Path) -> Tokens:
    """Generate each prompt alone, in an engine with enough blocks. Return the tokens."""
    with make_llm(checkpoint) as llm:
        return [sampled(llm, [index])[0] for index in range(len(PROMPTS))]


def make_llm(checkpoint: Path, **options: Any) -> LLM:
    return LLM(checkpoint, **arguments(**options))


def arguments(**options: Any) -> EngineArgs:
    return {
        "dtype": "float32",
        "device": "cpu",
        "num_threads": 1,
        "num_blocks": 256,
        "max_model_len": 256,
        **options,
    }


def sampled(llm: LLM, indices: list[int]) -> Tokens:
    chosen = [PROMPTS[index] for index in indices]
    outputs = llm.generate(chosen, [PARAMS[index] for index in indices], use_tqdm=False)
    return [[sample.token_ids for sample in output.outputs] for output in outputs]


def preemptions(llm: LLM) -> float:
    return sum(
        metric.value for metric in llm.get_metrics() if metric.name == "baton:num_preemptions_total"
    )


def test_samples_of_a_prompt_differ_and_the_first_equals_a_single_sample(
    checkpoint: Path, alone: Tokens
) -> None:
    three = alone[5]
    assert len({tuple(tokens) for tokens in three}) == 3
    with make_llm(checkpoint) as llm:
        one = llm.generate(
            [PROMPTS[5]],
            SamplingParams(seed=5, max_tokens=NUM_TOKENS, ignore_eos=True),
            use_tqdm=False,
        )
    assert one[0].outputs[0].token_ids == three[0]


def test_the_reasoning_ends_after_its_budget(checkpoint: Path, alone: Tokens) -> None:
    [thinking] = alone[-1]
    tokenizer = Tokenizer.from_folder(checkpoint)
    thought, end, _ = tokenizer.decode(thinking).partition("</think>")
    assert (thought, end) == (tokenizer.decode(thinking[:BUDGET]), "</think>")


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="in a batch"),
        pytest.param({"max_num_batched_tokens": 16, "max_num_seqs": 16}, id="in chunks"),
        pytest.param({"max_num_seqs": 3}, id="few at a time"),
        pytest.param({"enable_prefix_caching": False}, id="without prefix cache"),
        pytest.param({"async_scheduling": True}, id="asynchronous"),
        pytest.param({"async_scheduling": False}, id="synchronous"),
        pytest.param({"tensor_parallel_size": 2}, id="on two tensor ranks"),
    ],
)
def test_tokens_do_not_depend_on_the_engine(
    checkpoint: Path, alone: Tokens, options: dict[str, Any]
) -> None:
    with make_llm(checkpoint, **options) as llm:
        assert sampled(llm, list(range(len(PROMPTS)))) == alone
        backwards = list(reversed(range(len(PROMPTS))))  # other neighbours in each batch
        assert sampled(llm, backwards) == [alone[index] for index in backwards]


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_tokens_do_not_depend_on_preemption(checkpoint: Path, alone: Tokens, mode: str) -> None:
    # Enough blocks only for the largest group.
    with make_llm(
        checkpoint, preemption_mode=mode, num_blocks=20, swap_memory_bytes=2**22, watermark=0.0
    ) as llm:
        assert sampled(llm, list(range(len(PROMPTS)))) == alone
        assert preemptions(llm) > 0, "nothing was preempted"


@pytest.fixture(scope="module")
def another_core(checkpoint: Path) -> Iterator[EngineCore]:
    """Start an engine that has not generated the first tokens."""
    config = engine_config(checkpoint, arguments(max_num_batched_tokens=32))
    executor = load_executor_class(executor_name(config))(
        config, uuid.uuid4().hex, threading.Event().set
    )
    core = EngineCore(config, executor)
    yield core
    core.shutdown()


def test_another_engine_continues_with_the_same_tokens(
    checkpoint: Path, alone: Tokens, another_core: EngineCore
) -> None:
    with make_llm(checkpoint) as llm:
        wires = [params.to_wire(llm.get_tokenizer(), seed=0) for params in PARAMS]
    continued: dict[str, list[int]] = {}
    expected: dict[str, list[int]] = {}
    for index, (prompt, params, wire) in enumerate(zip(PROMPTS, PARAMS, wires, strict=True)):
        if params.best_of is not None:  # samples are not in the order of their indices
            continue
        for sample_index, tokens in enumerate(alone[index]):
            for known in (1, 5, len(tokens) - 1):
                request_id = f"{index}-{sample_index}-{known}"
                refusal = another_core.add_request(
                    EngineCoreRequest(
                        request_id,
                        prompt,
                        wire,
                        generated_token_ids=tokens[:known],
                        sample_index=sample_index,
                    )
                )
                assert refusal is None
                continued[request_id], expected[request_id] = tokens[:known], tokens
    while another_core.has_requests:
        for output in another_core.step_fn():
            assert not output.error
            continued[output.request_id] = continued[output.request_id] + output.new_token_ids
    assert continued == expected
