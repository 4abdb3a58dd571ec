"""The forms of prompts in a body: a text, texts, token ids, or lists of token ids."""

from __future__ import annotations

from baton_text.request_error import RequestError

#: A text, a list of texts, a list of token ids, or a list of lists of token ids.
PromptForms = str | list[str | int | list[int]]


def num_prompts(given: PromptForms) -> int:
    """Return the number of prompts in a value that `prompt_list` accepts."""
    return 1 if isinstance(given, str) or isinstance(given[0], int) else len(given)


def prompt_list(given: PromptForms, field: str) -> list[str | list[int]]:
    """Return the prompts. Each prompt is a text or a list of token ids.

    Args:
        given: the field's value.
        field: name of the field, for errors.

    Raises:
        RequestError: the field is neither a prompt nor a list of prompts of one kind, or a list is
            empty.
    """
    if isinstance(given, str):
        prompts: list[str | list[int]] = [given]
    elif given and all(isinstance(item, int) for item in given):
        prompts = [[item for item in given if isinstance(item, int)]]
    elif all(isinstance(item, str) for item in given) or all(
        isinstance(item, list) for item in given
    ):
        prompts = [item for item in given if not isinstance(item, int)]
    else:
        raise RequestError(
            f"{field} must be a string, a list of strings, a list of token ids, "
            "or a list of lists of token ids",
            param=field,
        )
    if not prompts or any(len(item) == 0 for item in prompts if isinstance(item, list)):
        raise RequestError(f"{field} must not be empty", param=field)
    return prompts
