"""OpenAI's `/v1/chat/completions`: the JSON of its responses and chunks."""

from __future__ import annotations

import itertools
from operator import attrgetter

import msgspec

from baton_gateway.endpoints.writers.response_writer import (
    GenerationAPI,
    ResponseWriter,
    chunk_usage,
    new_call_id,
    returned_token_ids,
)
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
)


class ChatAPI(GenerationAPI[ChatCompletionRequest]):
    path = "/v1/chat/completions"
    body = ChatCompletionRequest

    def request(self, body: ChatCompletionRequest, earlier: bytes) -> ChatCompletionRequest:
        return body

    def writer(self, body: ChatCompletionRequest, job: Job, client: str | None) -> ChatWriter:
        return ChatWriter(body, job, self._served_name, self._tokenizer)


class ChatWriter(ResponseWriter[ChatCompletionRequest]):
    def response(self, outputs: list[tuple[Choice, TextOutput]]) -> ChatCompletion:
        choices = [
            ChatChoice(
                index=choice.index,
                message=_message(self.body, output),
                logprobs=self._logprobs(output),
                finish_reason=output.finish_reason,
                stop_reason=output.stop_reason,
                token_ids=returned_token_ids(self.body, output),
                num_nans_in_logits=output.num_nans_in_logits or msgspec.UNSET,
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
            self._chunk(ChatChunkChoice(index=choice.index, delta=delta))
            for choice in self.job.choices
        ]

    def events(self, choice: Choice, output: TextOutput, offset: int) -> list[msgspec.Struct]:
        piece = ChatChunkChoice(
            index=choice.index,
            delta=_delta(self.body, output),
            logprobs=self._logprobs(output) if output.logprobs else None,
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
            token_ids=returned_token_ids(self.body, output),
            num_nans_in_logits=output.num_nans_in_logits or msgspec.UNSET,
        )
        return [self._chunk(piece)]

    def closing(self) -> list[msgspec.Struct]:
        if not self.body.include_usage:
            return []
        chunk = self._chunk()
        chunk.usage = self.job.usage()
        return [chunk]

    def _chunk(self, *choices: ChatChunkChoice) -> ChatCompletionChunk:
        return ChatCompletionChunk(
            id=self.job.id,
            created=self.job.created,
            model=self.served_name,
            choices=list(choices),
            usage=chunk_usage(self.body, self.job),
        )

    def _logprobs(self, output: TextOutput) -> ChatLogprobs | None:
        return chat_logprobs(self.tokenizer, output.logprobs) if self.body.logprobs else None


def _message(request: ChatCompletionRequest, output: TextOutput) -> ChatResponseMessage:
    """Return the message of a complete choice."""
    if output.reply is None:
        return ChatResponseMessage(content=output.text)
    reply = output.reply
    calls: list[ChatToolCall] = []
    for _, group in itertools.groupby(reply.tool_calls, attrgetter("index")):
        first, *rest = group
        arguments = "".join(delta.arguments for delta in (first, *rest))
        function = CalledFunctionDelta(name=first.name, arguments=arguments)
        calls.append(ChatToolCall(id=new_call_id(), type="function", function=function))
    message = ChatResponseMessage(content=reply.content or (None if calls else ""))
    if reply.reasoning and request.include_reasoning is not False:
        message.reasoning_content = reply.reasoning
    if calls:
        message.tool_calls = calls
    return message


def _delta(request: ChatCompletionRequest, output: TextOutput) -> ChatDelta:
    """Return what a chunk adds to the message."""
    reply = output.reply
    content = output.text if reply is None else reply.content
    delta = ChatDelta()
    if reply is not None and reply.reasoning and request.include_reasoning is not False:
        delta.reasoning_content = reply.reasoning
    if reply is not None and reply.tool_calls:
        delta.tool_calls = [_call_delta(call) for call in reply.tool_calls]
    if content or (reply is None and output.finish_reason is None):
        delta.content = content
    return delta


def _call_delta(call: ToolCallDelta) -> ChatToolCall:
    function = CalledFunctionDelta(name=call.name, arguments=call.arguments)
    delta = ChatToolCall(index=call.index, function=function)
    if call.name is not msgspec.UNSET:
        delta.id, delta.type = new_call_id(), "function"
    return delta
