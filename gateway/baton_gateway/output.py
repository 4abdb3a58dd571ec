"""Tokens to text for one sequence: detokenizer, stop strings, logprobs."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton_engine.protocol.messages import EngineCoreOutput, FinishReason, TokenLogprobs
from baton_engine.text.detokenizer import IncrementalDetokenizer
from baton_engine.text.responses import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob
from baton_engine.text.stop import StopScanner
from baton_engine.text.tokenizer import Tokenizer


@dataclass
class TextOutput:
    """What one engine output adds to the answer."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    """Also those whose text is held back or left out."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    """OpenAI's: stop or length."""


class OutputProcessor:
    """Turns one sequence's outputs into text.

    Args:
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
    ) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
        self._scanner = StopScanner(stops, include_stop=include_stop)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self.num_tokens = 0
        """Tokens of the answer: up to the one that completed a stop string."""

    def push(self, output: EngineCoreOutput) -> TextOutput:
        """After a result with a finish_reason nothing more may be pushed; the engine may not have finished by itself."""
        result = TextOutput()
        for index, token_id in enumerate(output.new_token_ids):
            self.num_tokens += 1
            result.token_ids.append(token_id)
            last = index == len(output.new_token_ids) - 1
            if last and output.stop_token_id is not None and not self._include_stop:
                break  # the token that ends the answer is no part of it
            result.text += self._scan(self._detokenizer.push([token_id]))
            if output.new_logprobs is not None:
                result.logprobs.append(output.new_logprobs[index])
            if self._scanner.matched is not None:
                result.finish_reason = "stop"
                return result
        if output.finished:
            result.text += self._scan(self._detokenizer.flush())
            stopped = output.finish_reason is FinishReason.STOP or self._scanner.matched is not None
            result.text += self._scanner.flush()
            result.finish_reason = "stop" if stopped else "length"
        return result

    def _scan(self, text: str) -> str:
        return text if self.num_tokens <= self._min_tokens else self._scanner.push(text)


def chat_logprobs(tokenizer: Tokenizer, logprobs: list[TokenLogprobs]) -> ChatLogprobs:
    """OpenAI's shape for chat completions; `bytes` are the token's own, also where its text is part of a character."""

    def text(token_id: int) -> str:
        return tokenizer.decode([token_id], skip_special_tokens=False)

    return ChatLogprobs(
        content=[
            TokenLogprob(
                token=text(item.token_id),
                logprob=item.logprob,
                bytes=list(tokenizer.token_bytes(item.token_id)),
                top_logprobs=[
                    TopLogprob(token=text(token_id), logprob=logprob, bytes=list(tokenizer.token_bytes(token_id)))
                    for token_id, logprob in item.top
                ],
            )
            for item in logprobs
        ]
    )


def completion_logprobs(tokenizer: Tokenizer, logprobs: list[TokenLogprobs], offset: int) -> CompletionLogprobs:
    """OpenAI's older shape. `offset`: characters of the tokens before the first of these."""
    result = CompletionLogprobs()
    for item in logprobs:
        token = tokenizer.decode([item.token_id], skip_special_tokens=False)
        result.tokens.append(token)
        result.token_logprobs.append(item.logprob)
        result.top_logprobs.append(
            {tokenizer.decode([token_id], skip_special_tokens=False): logprob for token_id, logprob in item.top}
        )
        result.text_offset.append(offset)
        offset += len(token)
    return result
