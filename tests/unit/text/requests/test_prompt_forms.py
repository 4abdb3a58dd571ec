"""The forms of prompts in a body."""

from __future__ import annotations

from typing import Any

import pytest

from baton_text.request_error import RequestError
from baton_text.requests.prompt_forms import num_prompts, prompt_list


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("a", ["a"]),
        ("", [""]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_each_form_is_a_list_of_prompts(given: Any, prompts: list[Any]) -> None:
    assert prompt_list(given, "prompt") == prompts
    assert num_prompts(given) == len(prompts)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "input must not be empty"),
        ([[1], []], "input must not be empty"),
        (["a", 1], "input must be a string, a list of strings"),
        ([1, [2]], "input must be a string, a list of strings"),
    ],
)
def test_other_forms_are_refused_with_the_field(given: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message) as refused:
        prompt_list(given, "input")
    assert refused.value.param == "input"
