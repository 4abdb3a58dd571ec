"""`LLM.score` and encoders, on tiny checkpoints: scores and embeddings against transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from baton_engine import LLM, SamplingParams
from baton_engine.random_checkpoint import create_checkpoint
from baton_protocol.pooling_params import PairFormat
from baton_protocol.process.fatal import ConfigurationError
from baton_text.score_prompts import encode_pair
from baton_text.tokenizer import Tokenizer
from support.engine.model_cases import edit_config
from support.parity import cosine, reference_embedding, reference_model

SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_layers": 2, "vocab_size": 512}
QUERY = "Which runner crosses the bridge?"
DOCUMENTS = ["The quick runner crosses the bridge.", "A letter.", "never never never"]
SAME = 0.9999

pytestmark = pytest.mark.usefixtures("one_thread")


def make_llm(path: Path, **args) -> LLM:
    return LLM(path, **{"dtype": "float32", "num_blocks": 96, "num_threads": 1, **args})


def scores(llm: LLM) -> list[float]:
    return [each.outputs.score for each in llm.score(QUERY, DOCUMENTS, use_tqdm=False)]


@torch.inference_mode()
def reference_scores(path: Path, pair_format: PairFormat) -> list[float]:
    """Return the scores of a classifier of transformers."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32).eval()
    tokenizer = Tokenizer.from_folder(path)
    found = []
    for document in DOCUMENTS:
        token_ids, second = encode_pair(tokenizer, pair_format, QUERY, document)
        inputs = {"input_ids": torch.tensor([token_ids])}
        if second is not None:
            inputs["token_type_ids"] = (torch.arange(len(token_ids)) >= second).long()[None]
        found.append(model(**inputs).logits.sigmoid().item())
    return found


@pytest.mark.parametrize(
    ("arch", "pair_format"),
    [("bert", PairFormat.TOKENIZER), ("qwen3", PairFormat.QWEN3_RERANKER)],
)
def test_scores_of_classifiers_match_transformers(
    tmp_path: Path, arch: str, pair_format: PairFormat
) -> None:
    path = create_checkpoint(tmp_path / arch, arch, classifier=True, **SMALL)
    with make_llm(path, max_num_seqs=2) as llm:
        found = scores(llm)
        with pytest.raises(ValueError, match="this engine pools prompts"):
            llm.generate("a", SamplingParams(max_tokens=1), use_tqdm=False)
    assert found == pytest.approx(reference_scores(path, pair_format), abs=1e-5)
    assert max(found) - min(found) > 1e-3, "the model ignores the texts"


def test_scores_by_tokens_match_the_logits_of_transformers(tmp_path: Path) -> None:
    path = create_checkpoint(tmp_path / "reranker", "qwen3", **SMALL)
    model, tokenizer = reference_model(path), Tokenizer.from_folder(path)
    ids = [tokenizer.token_id("n"), tokenizer.token_id("y")]
    expected = []
    for document in DOCUMENTS:
        prompt = encode_pair(tokenizer, PairFormat.QWEN3_RERANKER, QUERY, document)
        with torch.inference_mode():
            logits = model(torch.tensor([prompt.token_ids])).logits[0, -1, ids]
        expected.append(logits.softmax(-1)[1].item())
    args = {"runner": "pooling", "classifier_from_token": ["n", "y"]}
    with make_llm(path, max_num_batched_tokens=50, **args) as llm:
        assert scores(llm) == pytest.approx(expected, abs=1e-4)
    edit_config(path, classifier_from_token=["n", "y"])  # a checkpoint can contain the setting
    with make_llm(path) as llm:
        assert scores(llm) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (["n", "no such token"], "'no such token', which is not a token"),
        (["n"], "must be two tokens"),
    ],
)
def test_tokens_of_a_score_are_checked(tmp_path: Path, tokens: list[str], message: str) -> None:
    path = create_checkpoint(tmp_path / "reranker", "qwen3", **SMALL)
    with pytest.raises((ConfigurationError, ValueError), match=message):
        make_llm(path, classifier_from_token=tokens)


def test_scores_of_an_embedding_model_are_cosines(tmp_path: Path) -> None:
    path = create_checkpoint(tmp_path / "model", "qwen3", pooling="mean", **SMALL)
    with make_llm(path) as llm:
        texts = [QUERY, *DOCUMENTS]
        query, *documents = (each.outputs.embedding for each in llm.embed(texts, use_tqdm=False))
        assert scores(llm) == pytest.approx([cosine(query, each) for each in documents], abs=1e-5)
        [one] = llm.score([QUERY], [QUERY], use_tqdm=False)
        assert one.outputs.score == pytest.approx(1.0, abs=1e-5)


def test_pairs_are_one_to_many_or_one_to_one(tmp_path: Path) -> None:
    path = create_checkpoint(tmp_path / "model", "qwen3", classifier=True, **SMALL)
    with make_llm(path) as llm:
        outputs = llm.score([QUERY, "a"], DOCUMENTS[:2], use_tqdm=False)
        assert len(outputs) == 2
        assert outputs[0].prompt_token_ids
        for first, second in ((["a", "b"], ["c"]), (["a"], []), ([], [])):
            with pytest.raises(ValueError, match="as many texts as data_2"):
                llm.score(first, second, use_tqdm=False)
        with pytest.raises(TypeError, match="data_2 must be a text"):
            llm.score("a", [5], use_tqdm=False)  # type: ignore[list-item]


def test_an_error_of_a_pair_names_its_position(tmp_path: Path) -> None:
    path = create_checkpoint(tmp_path / "qwen3", "qwen3", pooling="mean", **SMALL)
    with make_llm(path) as llm, pytest.raises(ValueError, match="prompt 2"):
        llm.score(["a", "b", "c"], ["d", "e", "hi\ud800"], use_tqdm=False)


def test_a_classifier_of_several_labels_is_refused(tmp_path: Path) -> None:
    path = create_checkpoint(tmp_path / "model", "qwen3", classifier=True, **SMALL)
    edit_config(path, id2label={"0": "a", "1": "b"})
    with pytest.raises(ConfigurationError, match="the classifier has 2 labels"):
        make_llm(path)


@pytest.mark.parametrize("pooling", [None, "cls", "mean"])
def test_embeddings_of_an_encoder_match_transformers(tmp_path: Path, pooling: str | None) -> None:
    """Prompts of different lengths share a step. Each attends only to its own tokens."""
    path = create_checkpoint(tmp_path / "bert", "bert", pooling=pooling, **SMALL)
    prompts = [list(range(3, 3 + length)) for length in (1, 2, 16, 17, 60, 100)]
    with make_llm(path, max_num_seqs=4, max_num_batched_tokens=110, max_model_len=110) as llm:
        outputs = llm.embed(prompts, use_tqdm=False)
        again = llm.embed(prompts[-1], use_tqdm=False)[0]
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = reference_embedding(path, prompt, pooling or "cls")
        assert cosine(output.outputs.embedding, expected) > SAME, f"{len(prompt)} tokens"
    assert again.num_cached_tokens == 0
    assert cosine(again.outputs.embedding, outputs[-1].outputs.embedding) > SAME


def test_prompts_of_an_encoder_run_in_one_step(tmp_path: Path) -> None:
    path = create_checkpoint(tmp_path / "bert", "bert", pooling="mean", **SMALL)
    with make_llm(path, max_num_batched_tokens=20) as llm:  # limits the length
        assert len(llm.embed([list(range(3, 23))] * 3, use_tqdm=False)) == 3
        with pytest.raises(ValueError, match="the maximum length is 20 tokens"):
            llm.embed(list(range(3, 24)), use_tqdm=False)
    with pytest.raises(ConfigurationError, match="runs in one step"):
        make_llm(path, max_num_batched_tokens=20, max_model_len=21)


def test_an_encoder_cannot_generate(tmp_path: Path) -> None:
    path = create_checkpoint(tmp_path / "bert", "bert", **SMALL)
    with pytest.raises(ConfigurationError, match="has no output layer, so it cannot generate"):
        make_llm(path, runner="generate")


def test_names_of_a_masked_language_model_are_accepted(tmp_path: Path) -> None:
    """Its names begin with `bert.`, and its output layer is ignored."""
    from transformers import BertConfig, BertForMaskedLM

    path = create_checkpoint(tmp_path / "bert", "bert", **SMALL)
    config = BertConfig(**json.loads((path / "config.json").read_text()))
    BertForMaskedLM(config).save_pretrained(path)
    prompt = list(range(3, 40))
    with make_llm(path) as llm:
        [output] = llm.embed(prompt, use_tqdm=False)
    assert cosine(output.outputs.embedding, reference_embedding(path, prompt, "cls")) > SAME


@pytest.mark.parametrize("parallel", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_ranks_share_an_encoder(tmp_path: Path, parallel: str) -> None:
    path = create_checkpoint(tmp_path / "bert", "bert", pooling="mean", **SMALL)
    prompt = list(range(3, 40))
    with make_llm(path, **{parallel: 2}) as llm:
        [output] = llm.embed(prompt, use_tqdm=False)
    assert cosine(output.outputs.embedding, reference_embedding(path, prompt, "mean")) > SAME
