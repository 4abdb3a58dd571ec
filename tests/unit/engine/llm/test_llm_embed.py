"""`LLM.embed` on tiny checkpoints: embeddings against transformers, parameters, errors."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from baton_engine import LLM, PoolingParams, SamplingParams
from baton_engine.random_checkpoint import create_checkpoint
from baton_protocol.process.fatal import ConfigurationError
from support.parity import cosine, reference_embedding

POOLINGS = ("last", "mean", "cls")
SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_layers": 2, "vocab_size": 512}
#: Lower than the cosine of any correct embedding in float32.
SAME = 0.9999

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    root = tmp_path_factory.mktemp("embed")

    @functools.cache
    def create(arch: str, pooling: str) -> Path:
        return create_checkpoint(root / f"{arch}-{pooling}", arch, pooling=pooling, **SMALL)

    return create


def make_llm(path: Path, **args) -> LLM:
    return LLM(path, **{"dtype": "float32", "num_blocks": 96, "num_threads": 1, **args})


def random_prompts(lengths: Sequence[int]) -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randrange(3, 512) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("arch", ["qwen3", "llama", "qwen3_moe"])
def test_embeddings_match_transformers_for_whole_prompts_and_chunks(
    checkpoint: Callable[[str, str], Path], arch: str, pooling: str
) -> None:
    path = checkpoint(arch, pooling)
    prompts = random_prompts([1, 2, 15, 16, 17, 40, 100, 100])
    for budget in (512, 7):  # 7: all prompts but the shortest run in several steps
        with make_llm(path, max_num_batched_tokens=budget, max_num_seqs=5) as llm:
            outputs = llm.embed(prompts, use_tqdm=False)
        for prompt, output in zip(prompts, outputs, strict=True):
            expected = reference_embedding(path, prompt, pooling)
            embedding = output.outputs.embedding
            assert cosine(embedding, expected) > SAME, f"{len(prompt)} tokens, budget {budget}"
            assert math.hypot(*embedding) == pytest.approx(1.0, abs=1e-5)
            assert output.prompt_token_ids == prompt


@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_repeated_prompt_has_the_same_embedding_with_and_without_cached_blocks(
    checkpoint: Callable[[str, str], Path], pooling: str
) -> None:
    """Only the last token's pooling may start from cached blocks."""
    [prompt] = random_prompts([50])
    with make_llm(checkpoint("qwen3", pooling)) as llm:
        [first], [second] = (llm.embed(prompt, use_tqdm=False) for _ in range(2))
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens == (48 if pooling == "last" else 0)
    assert cosine(first.outputs.embedding, second.outputs.embedding) > SAME


def test_dimensions_and_normalize_are_applied_per_prompt(
    checkpoint: Callable[[str, str], Path],
) -> None:
    [prompt] = random_prompts([20])
    params = [
        PoolingParams(normalize=False),
        PoolingParams(),
        PoolingParams(dimensions=5),
        PoolingParams(dimensions=5, normalize=False),
    ]
    with make_llm(checkpoint("qwen3", "mean")) as llm:
        raw, unit, short, raw_short = (
            output.outputs.embedding
            for output in llm.embed([prompt] * 4, use_tqdm=False, pooling_params=params)
        )
    length = math.hypot(*raw)
    assert length != pytest.approx(1.0, abs=0.01)
    assert unit == pytest.approx([value / length for value in raw], abs=1e-5)
    assert raw_short == pytest.approx(raw[:5], abs=1e-5)
    short_length = math.hypot(*raw[:5])
    assert short == pytest.approx([value / short_length for value in raw[:5]], abs=1e-5)


def test_a_prompt_may_have_as_many_tokens_as_the_model(
    checkpoint: Callable[[str, str], Path],
) -> None:
    longest, longer = random_prompts([32, 33])
    with make_llm(checkpoint("qwen3", "last"), max_model_len=32) as llm:
        [output] = llm.embed(longest, use_tqdm=False)
        assert len(output.outputs.embedding) == SMALL["hidden_size"]
        with pytest.raises(ValueError, match="the maximum length is 32 tokens"):
            llm.embed(longer, use_tqdm=False)


def test_many_prompts_run_after_a_sleep(checkpoint: Callable[[str, str], Path]) -> None:
    prompts = random_prompts([30] * 40)
    with make_llm(checkpoint("qwen3", "mean"), max_num_seqs=8) as llm:
        before = [each.outputs.embedding for each in llm.embed(prompts, use_tqdm=False)]
        llm.sleep(1)
        llm.wake_up()
        after = [each.outputs.embedding for each in llm.embed(prompts, use_tqdm=False)]
    assert all(cosine(*pair) > SAME for pair in zip(before, after, strict=True))


def test_an_embedding_model_generates_nothing_and_a_generating_model_embeds_nothing(
    checkpoint: Callable[[str, str], Path], tmp_path: Path
) -> None:
    with make_llm(checkpoint("qwen3", "last")) as llm:
        with pytest.raises(ValueError, match="this engine pools prompts"):
            llm.generate("a", SamplingParams(max_tokens=2), use_tqdm=False)
        assert len(llm.embed("a", use_tqdm=False)) == 1
        with pytest.raises(ValueError, match=r"dimensions must be in \[1, 64\] .* got 65"):
            llm.embed("a", use_tqdm=False, pooling_params=PoolingParams(dimensions=65))
        with pytest.raises(TypeError, match="pooling_params must be PoolingParams"):
            llm.embed("a", use_tqdm=False, pooling_params="mean")  # type: ignore[arg-type]
    generating = create_checkpoint(tmp_path / "model", "qwen3", **SMALL)
    with make_llm(generating) as llm, pytest.raises(ValueError, match="this engine generates text"):
        llm.embed("a", use_tqdm=False)


def test_a_generating_checkpoint_can_be_pooled(tmp_path: Path) -> None:
    path = create_checkpoint(tmp_path / "model", "qwen3", **SMALL)
    prompts = random_prompts([3, 20])
    with make_llm(path, runner="pooling") as llm:
        outputs = llm.embed(prompts, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert cosine(output.outputs.embedding, reference_embedding(path, prompt, "last")) > SAME


def test_an_embedding_checkpoint_cannot_generate(
    checkpoint: Callable[[str, str], Path],
) -> None:
    with pytest.raises(ConfigurationError, match=r"embed_tokens\.weight is missing"):
        make_llm(checkpoint("qwen3", "last"), runner="generate")


@pytest.mark.parametrize("args", [{"async_scheduling": True}, {"quantization": "int8"}])
def test_embeddings_are_nearly_the_same_with_other_options(
    checkpoint: Callable[[str, str], Path], args: dict[str, object]
) -> None:
    path = checkpoint("qwen3", "mean")
    prompts = random_prompts([5, 30, 60])
    with make_llm(path, max_num_batched_tokens=16, **args) as llm:
        outputs = llm.embed(prompts, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert cosine(output.outputs.embedding, reference_embedding(path, prompt, "mean")) > 0.99


def test_pipeline_stages_pool_on_the_last_stage(checkpoint: Callable[[str, str], Path]) -> None:
    path = checkpoint("qwen3", "mean")
    prompts = random_prompts([5, 30])
    with make_llm(path, pipeline_parallel_size=2, max_num_batched_tokens=16) as llm:
        outputs = llm.embed(prompts, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert cosine(output.outputs.embedding, reference_embedding(path, prompt, "mean")) > SAME


def test_embeddings_are_finite_for_texts(checkpoint: Callable[[str, str], Path]) -> None:
    with make_llm(checkpoint("qwen3", "last")) as llm:
        [output] = llm.embed("The quick runner", use_tqdm=False)
    assert torch.tensor(output.outputs.embedding).isfinite().all()
