"""OpenAI's `/v1/chat/completions`: the JSON of its responses and chunks."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

from baton_gateway.endpoints.writers.chunk_writer import ChunkWriter
from baton_gateway.endpoints.writers.generation_api import GenerationAPI, new_call_id
from baton_gateway.requests.job import Choice, Job
from baton_text.output import TextOutput, chat_logprobs, prompt_token_logprobs
from baton_text.reply_parsing.tool_formats import ToolCallDelta
from baton_text.requests.chat_request import ChatCompletionRequest
from baton_text.responses.openai import (
    CalledFunctionDelta,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatLogprobs,
    ChatResponseMessage,
    ChatToolCall,
    Usage,
)


class ChatAPI(GenerationAPI[ChatCompletionRequest]):
    path = "/v1/chat/completions"
    body = ChatCompletionRequest

    def request(self, body: ChatCompletionRequest, earlier: bytes) -> ChatCompletionRequest:
        return body

    def writer(self, body: ChatCompletionRequest, job: Job, client: str | None) -> ChatWriter:
        return ChatWriter(body, job, self._served_name, self._tokenizer)


class ChatWriter(ChunkWriter[ChatCompletionRequest]):
    def response(self, outputs: list[tuple[Choice, TextOutput]]) -> ChatCompletion:
        choices = [
            ChatChoice(
                index=choice.index,
                message=_message(self.body, output),
                logprobs=self._logprobs(output),
                finish_reason=output.finish_reason,
                stop_reason=output.stop_reason,
                token_ids=self._token_ids(output),
                num_nans_in_logits=output.num_nans_in_logits or UNSET,
            )
            for choice, output in outputs
        ]
        answer = ChatCompletion(
            id=self.job.id,
            created=self.job.created,
            model=self.served_name,
            choices=choices,
            usage=self.job.usage(),
        )
        if self.body.prompt_logprobs is not None:
            answer.prompt_logprobs = prompt_token_logprobs(
                self.tokenizer, outputs[0][1].prompt_logprobs or []
            )
        return answer

    def opening(self) -> list[msgspec.Struct]:
        delta = ChatDelta(role="assistant", content="")
        return [
            self._choice_chunk(ChatChunkChoice(index=choice.index, delta=delta))
            for choice in self.job.choices
        ]

    def events(self, choice: Choice, output: TextOutput, offset: int) -> list[msgspec.Struct]:
        *deltas, delta = _deltas(self.body, output)
        last = ChatChunkChoice(
            index=choice.index,
            delta=delta,
            logprobs=self._logprobs(output) if output.logprobs else None,
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
            token_ids=self._token_ids(output),
            num_nans_in_logits=output.num_nans_in_logits or UNSET,
        )
        pieces = [ChatChunkChoice(index=choice.index, delta=delta) for delta in deltas]
        return [self._choice_chunk(piece) for piece in (*pieces, last)]

    def _chunk(
        self, choices: list[ChatChunkChoice], usage: Usage | UnsetType | None
    ) -> ChatCompletionChunk:
        return ChatCompletionChunk(
            id=self.job.id,
            created=self.job.created,
            model=self.served_name,
            choices=choices,
            usage=usage,
        )

    def _logprobs(self, output: TextOutput) -> ChatLogprobs | None:
        return chat_logprobs(self.tokenizer, output.logprobs) if self.body.logprobs else None


def _message(request: ChatCompletionRequest, output: TextOutput) -> ChatResponseMessage:
    """Return the message of a choice whose output is complete."""
    reply = output.reply
    if reply is None:
        return ChatResponseMessage(content=output.text)
    calls = [_tool_call(call) for call in reply.tool_calls]
    reasoning = reply.reasoning if request.include_reasoning is not False else ""
    return ChatResponseMessage(
        content=reply.content or (None if calls else ""),
        reasoning_content=reasoning or UNSET,
        tool_calls=calls or UNSET,
    )


def _deltas(request: ChatCompletionRequest, output: TextOutput) -> list[ChatDelta]:
    """Return what an output adds to the message: one delta for text, and one for each tool call.

    Some clients read only the first tool call of a chunk.
    """
    reply = output.reply
    if reply is None:
        is_empty = not output.text and output.finish_reason is not None
        return [ChatDelta(content=UNSET if is_empty else output.text)]
    reasoning = reply.reasoning if request.include_reasoning is not False else ""
    text = ChatDelta(content=reply.content or UNSET, reasoning_content=reasoning or UNSET)
    calls = [ChatDelta(tool_calls=[_tool_call(call, call.index)]) for call in reply.tool_calls]
    return calls if calls and text == ChatDelta() else [text, *calls]


def _tool_call(call: ToolCallDelta, index: int | UnsetType = UNSET) -> ChatToolCall:
    function = CalledFunctionDelta(name=call.name, arguments=call.arguments)
    result = ChatToolCall(index=index, function=function)
    if call.name is not UNSET:
        result.id, result.type = new_call_id(), "function"
    return result
