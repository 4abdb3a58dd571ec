"""Tokens to text for one sequence: detokenizer, stop strings, logprobs. Shared by the gateway and the offline API."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from baton_protocol.messages import (
    BeamOutput,
    EngineCoreOutput,
    PromptLogprobs,
    RoutedExperts,
    TokenLogprobs,
)
from baton_text.detokenizer import IncrementalDetokenizer
from baton_text.responses import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptTokenLogprob,
    TokenLogprob,
    TopLogprob,
)
from baton_text.stop import StopScanner
from baton_text.tokenizer import Tokenizer


@dataclass
class TextOutput:
    """What one engine output adds to the answer."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    """Also those whose text is held back or left out."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of the tokens that are part of the answer: not of a token that ends it."""
    finish_reason: str | None = None
    """stop, length or repetition."""
    stop_reason: int | str | None = None
    """The stop string or token id that ended it; None for the model's own end."""
    prompt_logprobs: PromptLogprobs | None = None
    """Of prompt positions 1 on; with the first token of a sequence that asked for them."""


class OutputProcessor:
    """Turns one sequence's outputs into text.

    Args:
        stops: strings that end the text.
        include_stop: what ends the text, a string or a token, is part of it.
        stop_token_ids: the client's own, as opposed to the model's end tokens: they are told as stop_reason.
        min_tokens: stop strings are not looked for in the text of the first so many tokens.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stops: list[str],
        include_stop: bool,
        skip_special_tokens: bool,
        min_tokens: int,
        stop_token_ids: list[int] | None = None,
    ) -> None:
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, skip_special_tokens=skip_special_tokens
        )
        self._scanner = StopScanner(stops, include_stop=include_stop)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._stop_token_ids = frozenset(stop_token_ids or ())
        self.num_tokens = 0
        """Tokens of the answer: up to the one that completed a stop string."""
        self.cumulative_logprob = 0.0
        """Of these tokens, if logprobs are asked for."""

    @property
    def mean_logprob(self) -> float:
        """Log-probability per token: what best_of orders sequences by."""
        return self.cumulative_logprob / max(1, self.num_tokens)

    def push(self, output: EngineCoreOutput) -> TextOutput:
        """After a result with a finish_reason nothing more may be pushed; the engine may not have finished by itself."""
        result = TextOutput(prompt_logprobs=output.prompt_logprobs)
        for index, token_id in enumerate(output.new_token_ids):
            self.num_tokens += 1
            result.token_ids.append(token_id)
            if output.new_logprobs is not None:
                self.cumulative_logprob += output.new_logprobs[index].logprob
            last = index == len(output.new_token_ids) - 1
            if last and output.stop_token_id is not None and not self._include_stop:
                break  # the token that ends the answer is no part of it
            result.text += self._scan(self._detokenizer.push([token_id]))
            if output.new_logprobs is not None:
                result.logprobs.append(output.new_logprobs[index])
            if self._scanner.matched is not None:
                result.finish_reason, result.stop_reason = "stop", self._scanner.matched
                return result
        if output.finish_reason is not None:
            result.text += self._scan(self._detokenizer.flush())
            result.text += self._scanner.flush()
            result.finish_reason = str(output.finish_reason)
            if self._scanner.matched is not None:
                result.finish_reason, result.stop_reason = "stop", self._scanner.matched
            elif output.stop_token_id in self._stop_token_ids:
                result.stop_reason = output.stop_token_id
        return result

    def push_beam(self, request_id: str, beam: BeamOutput) -> TextOutput:
        """A finished beam, as if one sequence had ended with it."""
        return self.push(beam_as_output(request_id, beam))

    def _scan(self, text: str) -> str:
        return text if self.num_tokens <= self._min_tokens else self._scanner.push(text)


def beam_as_output(request_id: str, beam: BeamOutput) -> EngineCoreOutput:
    """The output of a sequence that generated what the beam did."""
    return EngineCoreOutput(
        request_id,
        beam.token_ids,
        finish_reason=beam.finish_reason,
        stop_token_id=beam.stop_token_id,
        new_logprobs=beam.logprobs,
    )


def chat_logprobs(tokenizer: Tokenizer, logprobs: list[TokenLogprobs]) -> ChatLogprobs:
    """OpenAI's shape for chat completions; `bytes` are the token's own, also where its text is part of a character."""
    text = tokenizer.token_text

    return ChatLogprobs(
        content=[
            TokenLogprob(
                token=text(item.token_id),
                logprob=item.logprob,
                bytes=list(tokenizer.token_bytes(item.token_id)),
                top_logprobs=[
                    TopLogprob(
                        token=text(token_id),
                        logprob=logprob,
                        bytes=list(tokenizer.token_bytes(token_id)),
                    )
                    for token_id, logprob in item.top
                ],
            )
            for item in logprobs
        ]
    )


def completion_logprobs(
    tokenizer: Tokenizer,
    logprobs: list[TokenLogprobs],
    offset: int,
    *,
    first_token_id: int | None = None,
) -> CompletionLogprobs:
    """OpenAI's older shape.

    Args:
        offset: characters of the tokens before the first of these.
        first_token_id: a prompt's first token, which comes before all of them and has no logprob.
    """
    result = CompletionLogprobs()
    text = tokenizer.token_text

    def add(token_id: int, logprob: float | None, top: dict[str, float] | None) -> None:
        nonlocal offset
        result.tokens.append(text(token_id))
        result.token_logprobs.append(logprob)
        result.top_logprobs.append(top)
        result.text_offset.append(offset)
        offset += len(result.tokens[-1])

    if first_token_id is not None:
        add(first_token_id, None, None)
    for item in logprobs:
        # The token itself is always there. Of tokens with one text (parts of characters), the most likely one is.
        top: dict[str, float] = {}
        for token_id, logprob in (*item.top, (item.token_id, item.logprob)):
            top.setdefault(text(token_id), logprob)
        add(item.token_id, item.logprob, top)
    return result


def prompt_token_logprobs(
    tokenizer: Tokenizer, logprobs: PromptLogprobs
) -> list[dict[int, PromptTokenLogprob] | None]:
    """vLLM's shape: per prompt token, by token id, the most likely ones and the prompt's own; nothing for the first."""
    return [None, *(ranked_logprobs(tokenizer, item) for item in logprobs)]


def ranked_logprobs(tokenizer: Tokenizer, item: TokenLogprobs) -> dict[int, PromptTokenLogprob]:
    """One position: its own token first, then the most likely ones."""

    def entry(token_id: int, logprob: float, rank: int) -> PromptTokenLogprob:
        return PromptTokenLogprob(
            logprob=logprob, rank=rank, decoded_token=tokenizer.token_text(token_id)
        )

    result = {item.token_id: entry(item.token_id, item.logprob, item.rank)}
    for rank, (token_id, logprob) in enumerate(item.top, start=1):
        result.setdefault(token_id, entry(token_id, logprob, rank))
    return result


def join_routed_experts(parts: list[RoutedExperts]) -> RoutedExperts | None:
    """Of consecutive tokens, put together; None if there are none."""
    if not parts:
        return None
    _, layers, experts = parts[0].shape
    shape = (sum(part.shape[0] for part in parts), layers, experts)
    return msgspec.structs.replace(
        parts[0], shape=shape, expert_ids=b"".join(part.expert_ids for part in parts)
    )
