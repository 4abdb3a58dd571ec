"""generation_config.json gives the sampling parameters that a request leaves out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from baton_text.generation_defaults import GenerationDefaults
from baton_text.requests.chat_request import ChatCompletionRequest


def written(folder: Path, **content: Any) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(content))
    return folder


def test_the_file_gives_defaults_and_other_fields_are_ignored(tmp_path: Path) -> None:
    folder = written(
        tmp_path,
        do_sample=True,
        eos_token_id=[1, 2],
        temperature=0.6,
        top_p=0.95,
        top_k=20,
        max_new_tokens=2048,
        repetition_penalty=None,
        transformers_version="4.51.0",
    )
    defaults = GenerationDefaults.from_folder(folder)
    assert defaults == GenerationDefaults(temperature=0.6, top_p=0.95, top_k=20, max_tokens=2048)
    assert defaults.sampling_fields() == {"temperature": 0.6, "top_p": 0.95, "top_k": 20}


def test_without_the_file_there_are_no_defaults(tmp_path: Path) -> None:
    assert GenerationDefaults.from_folder(tmp_path) == GenerationDefaults()


@pytest.mark.parametrize(
    "content", [{"temperature": "warm"}, {"top_p": 0.0}, {"max_new_tokens": -1}, {"min_p": 2.0}]
)
def test_values_that_cannot_work_are_refused(tmp_path: Path, content: dict[str, Any]) -> None:
    written(tmp_path, **content)
    with pytest.raises(ValueError, match=r"generation_config\.json cannot be used"):
        GenerationDefaults.from_folder(tmp_path)


def test_a_malformed_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"generation_config\.json cannot be used"):
        GenerationDefaults.from_folder(tmp_path)


def test_beam_searches_get_no_sampling_parameters() -> None:
    request = ChatCompletionRequest(model="m", messages=[], use_beam_search=True)
    GenerationDefaults(temperature=0.5).fill(request)
    assert request.temperature is None
