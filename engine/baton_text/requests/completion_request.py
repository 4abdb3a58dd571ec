"""The body of POST /v1/completions."""

from __future__ import annotations

from typing import Any, ClassVar

from baton_protocol.sampling_params import MAX_LOGPROBS
from baton_text.request_error import RequestError
from baton_text.requests.generation_request import GenerationRequest, check_max_tokens
from baton_text.requests.prompt_forms import PromptForms, num_prompts, prompt_list

#: OpenAI's default of `max_tokens` for completions. Chat completions may fill the context.
DEFAULT_MAX_TOKENS = 16


class CompletionRequest(GenerationRequest, kw_only=True):
    UNSUPPORTED: ClassVar[tuple[str, ...]] = ("suffix",)

    #: A text, a list of texts, a list of token ids, or a list of lists of token ids.
    prompt: PromptForms
    #: Report the log-probability of each token, and of this many most likely tokens at the same
    #: position. Bounds: 0..MAX_LOGPROBS.
    logprobs: int | None = None
    #: Begin the text of the response with the prompt. With `max_tokens` 0, generate nothing.
    echo: bool | None = None
    #: Add special tokens, such as BOS, to prompts that are texts. Unset: true.
    add_special_tokens: bool | None = None
    suffix: Any = None

    @property
    def num_sequences(self) -> int:
        return self.num_candidates * num_prompts(self.prompt)

    def release_prompt(self) -> None:
        super().release_prompt()
        self.prompt = ""

    def requested_max_tokens(self) -> int | None:
        if self.is_prompt_only:
            return 1  # the engine generates one token, which the response leaves out
        return DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def is_prompt_only(self) -> bool:
        # A client requests this with max_tokens=0 and echo.
        return bool(self.echo) and self.max_tokens == 0

    def requested_logprobs(self) -> int | None:
        return self.logprobs

    def requested_prompt_logprobs(self) -> int | None:
        """Return how many alternatives to report per prompt token. None means no logprobs.

        With `echo`, `logprobs` applies to prompt tokens too, unless `prompt_logprobs` is set.
        """
        if self.prompt_logprobs is None and self.echo:
            return self.logprobs
        return self.prompt_logprobs

    def validate(self) -> None:
        super().validate()
        if not self.is_prompt_only:
            check_max_tokens("max_tokens", self.max_tokens)
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise RequestError(
                f"logprobs must be in [0, {MAX_LOGPROBS}], got {self.logprobs}", param="logprobs"
            )
        self.prompts()

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts. Each prompt is a text or a list of token ids.

        Raises:
            RequestError: `prompt` is neither a prompt nor a list of prompts of one kind, or a list
                is empty.
        """
        return prompt_list(self.prompt, "prompt")
