"""Created checkpoints: valid for transformers, deterministic, and with clear greedy choices."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from baton_engine import random_checkpoint
from baton_engine.models.checkpoint.checkpoint_config import load_checkpoint_config
from baton_engine.models.factory import make_model
from baton_engine.random_checkpoint import ARCHITECTURES, SIZES, create_checkpoint

pytestmark = pytest.mark.usefixtures("one_thread")

TEXTS = [
    "Hello",
    "The quick runner carries the letter of a window slowly.",
    "déjà vu, 東京 🙂\n\tdef f(x):",
    " ",
]


@pytest.fixture(scope="module", params=ARCHITECTURES)
def created(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path]:
    """The architecture and the path of a checkpoint."""
    return request.param, create_checkpoint(
        tmp_path_factory.mktemp("created") / request.param, request.param, seed=3
    )


def test_transformers_loads_a_checkpoint_as_its_architecture(created: tuple[str, Path]) -> None:
    from transformers import AutoModelForCausalLM

    arch, path = created
    model, report = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert type(model).__name__ == ARCHITECTURES[arch]
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert model.generation_config.eos_token_id == [2, 0]


def test_greedy_decoding_has_clear_choices_and_does_not_repeat_itself(
    created: tuple[str, Path],
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(created[1], dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(created[1])
    gaps: list[float] = []
    for text in (TEXTS[0], TEXTS[1], TEXTS[2] * 4):
        prompt = tokenizer(text, return_tensors="pt").input_ids
        with torch.inference_mode():
            tokens = model.generate(prompt, max_new_tokens=48, do_sample=False, pad_token_id=0)
            best = model(tokens).logits[0].topk(2).values
        gaps += (best[:, 0] - best[:, 1]).tolist()
        generated = tokens[0, prompt.shape[1] :].tolist()
        assert len(generated) == 48, "the text ended early"
        assert len(set(generated)) > 16, "the text repeats itself"
    assert torch.tensor(gaps).median() > 0.1


def test_transformers_loads_the_tokenizer_and_the_chat_template(created: tuple[str, Path]) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(created[1])
    for text in TEXTS:
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert len(tokenizer(TEXTS[1]).input_ids) < len(TEXTS[1]) / 2, "the tokenizer has no merges"
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert chat == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer(chat).input_ids
    assert ids[0] == tokenizer.convert_tokens_to_ids("<|im_start|>"), (
        "special tokens are single tokens"
    )


def test_equal_arguments_give_equal_files_and_another_seed_gives_other_weights(
    tmp_path: Path,
) -> None:
    paths = [
        create_checkpoint(tmp_path / str(n), "llama", num_layers=1, seed=seed)
        for n, seed in enumerate((5, 5, 6))
    ]
    names = sorted(file.name for file in paths[0].iterdir())
    assert names == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    contents = [{name: (path / name).read_bytes() for name in names} for path in paths]
    assert contents[0] == contents[1]
    assert contents[0]["model.safetensors"] != contents[2]["model.safetensors"]


@pytest.mark.parametrize("max_shard_size", [None, 2**16])
def test_every_user_can_read_the_weights(tmp_path: Path, max_shard_size: int | None) -> None:
    create_checkpoint(tmp_path, "llama", max_shard_size=max_shard_size)
    files = list(tmp_path.glob("*.safetensors"))
    assert (len(files) > 1) == (max_shard_size is not None)
    assert all(file.stat().st_mode & 0o044 == 0o044 for file in files)


def test_the_vocabulary_can_be_larger_than_the_tokenizers_corpus_supports(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    path = create_checkpoint(tmp_path / "wide", "llama", num_layers=1, vocab_size=16384)
    assert Tokenizer.from_file(str(path / "tokenizer.json")).get_vocab_size() <= 16384
    assert json.loads((path / "config.json").read_text())["vocab_size"] == 16384


def test_the_command_line_writes_the_requested_sizes_and_refuses_a_folder_with_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    random_checkpoint.add_arguments(parser)
    out = tmp_path / "cli"
    arguments = [
        "--arch",
        "qwen3_moe",
        "--out",
        str(out),
        "--hidden-size",
        "64",
        "--layers",
        "1",
        "--experts",
        "4",
    ]
    assert random_checkpoint.run(parser.parse_args(arguments)) == 0
    config = json.loads((out / "config.json").read_text())
    assert (config["hidden_size"], config["num_hidden_layers"], config["num_experts"]) == (64, 1, 4)
    assert random_checkpoint.run(parser.parse_args(arguments)) == 2
    assert "not empty" in capsys.readouterr().err


def test_the_command_line_takes_a_preset_and_options_that_override_it(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    random_checkpoint.add_arguments(parser)
    out = tmp_path / "cli"
    options = ["--size", "150m", "--layers", "1", "--vocab-size", "300", "--sliding-window", "64"]
    options += ["--rope-scaling", "yarn", "--rope-factor", "2"]
    assert (
        random_checkpoint.run(parser.parse_args(["--arch", "mistral", "--out", str(out), *options]))
        == 0
    )
    config = json.loads((out / "config.json").read_text())
    sizes = (config["hidden_size"], config["num_hidden_layers"], config["vocab_size"])
    assert sizes == (768, 1, 300)
    assert config["sliding_window"] == 64
    assert config["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 2048,
    }


def test_the_preset_150m_has_about_150_million_parameters(tmp_path: Path) -> None:
    path = create_checkpoint(tmp_path / "model", "llama", size="150m", vocab_size=300, num_layers=1)
    config = replace(
        load_checkpoint_config(path),
        vocab_size=SIZES["150m"].vocab_size,
        num_layers=SIZES["150m"].num_layers,
    )
    assert 140e6 < sum(parameter.numel() for parameter in make_model(config).parameters()) < 160e6


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"vocab_size": 100}, "vocab_size"),
        ({"num_heads": 3}, "num_heads"),
        ({"head_dim": 7}, "head_dim"),
        ({"num_layers": 0}, "num_layers"),
        ({"max_shard_size": 0}, "max_shard_size"),
        ({"dtype": "int4"}, "dtype"),
        ({"num_experts_per_tok": 99}, "num_experts_per_tok"),
        ({"hidden_sise": 64}, "hidden_sise"),
        ({"size": "huge"}, "size must be one of tiny, 150m"),
        ({"rope_scaling": "dynamic"}, "rope_scaling must be one of linear, llama3, yarn"),
        ({"rope_factor": 0.5}, "rope_factor"),
        ({"sliding_window": 8}, "sliding_window must be positive, and is not for llama"),
    ],
)
def test_invalid_arguments_are_refused_by_name_and_write_nothing(
    tmp_path: Path, arguments: dict[str, Any], field: str
) -> None:
    with pytest.raises(ValueError, match=field):
        create_checkpoint(tmp_path / "bad", "llama", **arguments)
    assert not (tmp_path / "bad").exists()
