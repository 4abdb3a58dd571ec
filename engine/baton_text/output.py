"""Converts the tokens of one sequence to text, with stop strings and logprobs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

import msgspec

from baton_protocol.engine_messages import (
    BeamOutput,
    EngineCoreOutput,
    PromptLogprobs,
    TokenLogprobs,
)
from baton_text.detokenizer import IncrementalDetokenizer
from baton_text.reply_parsing.reply_parser import ReplyDelta, ReplyParser
from baton_text.responses.openai import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptTokenLogprob,
    TokenLogprob,
    TopLogprob,
)
from baton_text.stop_strings import StopScanner
from baton_text.tokenizer import Tokenizer


@dataclass(slots=True)
class TextOutput:
    """The text, tokens and logprobs that one engine output adds to a sequence."""

    text: str = ""
    #: All new tokens, including those whose text is held back or left out.
    token_ids: list[int] = field(default_factory=list)
    #: Logprobs of the new tokens, except a stop token that is left out of the text.
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    #: "stop", "length", "repetition" or "tool_calls" in the last output of the sequence, else None.
    finish_reason: str | None = None
    #: The stop string or token id that ended the text. None: EOS, or another finish_reason.
    stop_reason: int | str | None = None
    #: Logprobs of the prompt from position 1 on, if requested. Set with the first token.
    prompt_logprobs: PromptLogprobs | None = None
    #: Number of NaN logits from which the new tokens were sampled. 0 if the engine does not count
    #: them.
    num_nans_in_logits: int = 0
    #: The reasoning, content and tool calls of `text`. None if the reply is not parsed.
    reply: ReplyDelta | None = None

    @property
    def num_logprobs(self) -> int:
        """Number of all log-probabilities in this output, including those of the prompt."""
        of_prompt = sum(1 + len(item.top) for item in self.prompt_logprobs or ())
        return of_prompt + self.num_new_logprobs

    @property
    def num_new_logprobs(self) -> int:
        """Number of log-probabilities of the new tokens and of their alternatives."""
        return sum(1 + len(item.top) for item in self.logprobs)


class OutputProcessor:
    """Converts the outputs of one sequence to text.

    Args:
        tokenizer: the model's tokenizer.
        stops: strings that end the text.
        include_stop: include the stop string or stop token in the text.
        skip_special_tokens: leave special tokens out of the text.
        min_tokens: stop strings are ignored in the text of the first `min_tokens` tokens.
        stop_token_ids: stop tokens of the request. A stop token that ends the text becomes the
            `stop_reason` of the last TextOutput.
        reply_parser: divides the text into reasoning, content and tool calls.
        kept_token_ids: special tokens that `reply_parser` needs in the text.
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
        reply_parser: ReplyParser | None = None,
        kept_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        self._detokenizer = IncrementalDetokenizer(
            tokenizer,
            skip_special_tokens=skip_special_tokens,
            kept_token_ids=kept_token_ids,
        )
        self._scanner = StopScanner(stops, include_stop=include_stop)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._stop_token_ids = frozenset(stop_token_ids or ())
        self._reply_parser = reply_parser
        #: Number of tokens of the reasoning so far.
        self.num_reasoning_tokens = 0
        #: Number of tokens so far. Tokens after a stop string do not count.
        self.num_tokens = 0
        #: Sum of the log-probabilities of the tokens so far. 0 if the request asks for no logprobs.
        self.cumulative_logprob = 0.0

    @property
    def mean_logprob(self) -> float:
        """Mean log-probability of the tokens so far. `best_of` ranks sequences by this number."""
        return self.cumulative_logprob / max(1, self.num_tokens)

    def push(self, output: EngineCoreOutput) -> TextOutput:
        """Add an engine output, and return what the output adds to the text.

        A result with a finish_reason is the last result. After a stop string, the engine may still
        generate tokens, which the caller must not push.
        """
        result = self._push(output)
        if self._reply_parser is not None:
            self._parse(self._reply_parser, result)
        return result

    def _parse(self, parser: ReplyParser, result: TextOutput) -> None:
        """Set `result.reply` to the reasoning, content and tool calls of `result.text`.

        If the reply has tool calls, the finish reason "stop" becomes "tool_calls".
        """
        result.reply = parser.push(result.text)
        if parser.is_reasoning:
            self.num_reasoning_tokens += len(result.token_ids)
        if result.finish_reason is not None:
            end = parser.finish(is_truncated=result.finish_reason == "length")
            result.reply = ReplyDelta.join([result.reply, end])
            if parser.num_calls and result.finish_reason == "stop":
                result.finish_reason = "tool_calls"

    def _push(self, output: EngineCoreOutput) -> TextOutput:
        result = TextOutput(
            prompt_logprobs=output.prompt_logprobs, num_nans_in_logits=output.num_nans_in_logits
        )
        pieces = []
        for index, token_id in enumerate(output.new_token_ids):
            self.num_tokens += 1
            result.token_ids.append(token_id)
            if output.new_logprobs is not None:
                self.cumulative_logprob += output.new_logprobs[index].logprob
            last = index == len(output.new_token_ids) - 1
            if last and output.stop_token_id is not None and not self._include_stop:
                break  # the token that ends the text is not part of it
            pieces.append(self._scan(self._detokenizer.push([token_id])))
            if output.new_logprobs is not None:
                result.logprobs.append(output.new_logprobs[index])
            if self._scanner.matched is not None:
                break
        if output.finish_reason is not None and self._scanner.matched is None:
            pieces += [self._scan(self._detokenizer.flush()), self._scanner.flush()]
            result.finish_reason = str(output.finish_reason)
            if output.stop_token_id in self._stop_token_ids:
                result.stop_reason = output.stop_token_id
        if self._scanner.matched is not None:
            result.finish_reason, result.stop_reason = "stop", self._scanner.matched
        result.text = "".join(pieces)
        return result

    def push_beam(self, request_id: str, beam: BeamOutput) -> TextOutput:
        """Add a finished beam as the only output of the sequence, and return the beam's text."""
        output = EngineCoreOutput(
            request_id,
            beam.token_ids,
            finish_reason=beam.finish_reason,
            stop_token_id=beam.stop_token_id,
            new_logprobs=beam.logprobs,
        )
        return self.push(output)

    def _scan(self, text: str) -> str:
        return text if self.num_tokens <= self._min_tokens else self._scanner.push(text)


def chat_logprobs(tokenizer: Tokenizer, logprobs: list[TokenLogprobs]) -> ChatLogprobs:
    """Return logprobs in the form of OpenAI's chat completions.

    `bytes` holds all bytes of a token, even if the token is only a part of a character.
    """

    def entry(item: TokenLogprobs) -> TokenLogprob:
        return TokenLogprob(
            token=tokenizer.token_text(item.token_id),
            logprob=item.logprob,
            bytes=list(tokenizer.token_bytes(item.token_id)),
            top_logprobs=[
                TopLogprob(
                    token=tokenizer.token_text(token_id),
                    logprob=logprob,
                    bytes=list(tokenizer.token_bytes(token_id)),
                )
                for token_id, logprob in item.top
            ],
        )

    # Each entry is encoded at once: its objects take two to four times the memory of its JSON.
    encoded = [msgspec.Raw(msgspec.json.encode(entry(item))) for item in logprobs]
    return ChatLogprobs(content=cast("list[TokenLogprob]", encoded))


def completion_logprobs(
    tokenizer: Tokenizer,
    logprobs: list[TokenLogprobs],
    offset: int,
    *,
    first_token_id: int | None = None,
) -> CompletionLogprobs:
    """Return logprobs in the form of OpenAI's completions.

    Args:
        tokenizer: the model's tokenizer.
        logprobs: log-probabilities of consecutive tokens.
        offset: `text_offset` of the first token of the result, in characters.
        first_token_id: first token of an echoed prompt, for which `logprobs` has no entry. The
            result begins with this token, without a logprob. None: no token is prepended.
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
        # The token itself is always included. If tokens have the same text, the likeliest is kept.
        top: dict[str, float] = {}
        for token_id, logprob in (*item.top, (item.token_id, item.logprob)):
            top.setdefault(text(token_id), logprob)
        add(item.token_id, item.logprob, top)
    return result


def prompt_token_logprobs(
    tokenizer: Tokenizer, logprobs: PromptLogprobs
) -> list[dict[int, PromptTokenLogprob] | None]:
    """Return logprobs of a prompt in vLLM's form.

    Returns:
        For each prompt token, the logprobs of this token and of the likeliest tokens, by token id.
        None for the first prompt token.
    """
    return [None, *(ranked_logprobs(tokenizer, item) for item in logprobs)]


def ranked_logprobs(tokenizer: Tokenizer, item: TokenLogprobs) -> dict[int, PromptTokenLogprob]:
    """Return the logprobs of one position, by token id.

    The first entry is the token at the position. The likeliest tokens follow.
    """

    def entry(token_id: int, logprob: float, rank: int) -> PromptTokenLogprob:
        return PromptTokenLogprob(
            logprob=logprob, rank=rank, decoded_token=tokenizer.token_text(token_id)
        )

    result = {item.token_id: entry(item.token_id, item.logprob, item.rank)}
    for rank, (token_id, logprob) in enumerate(item.top, start=1):
        result.setdefault(token_id, entry(token_id, logprob, rank))
    return result
