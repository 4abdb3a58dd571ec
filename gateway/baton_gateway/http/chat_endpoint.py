"""`/v1/chat/completions`: the JSON of its responses and chunks."""

from __future__ import annotations

import secrets

import msgspec

from baton_gateway.http.generation_endpoint import GenerationEndpoint, returned_token_ids
from baton_gateway.requests.job import Choice, Job
from baton_text.output import TextOutput, chat_logprobs, prompt_token_logprobs
from baton_text.replies.tool_formats import ToolCallDelta
from baton_text.requests.chat_request import ChatCompletionRequest
from baton_text.responses import (
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


class ChatEndpoint(GenerationEndpoint[ChatCompletionRequest]):
    kind = ChatCompletionRequest

    def response(
        self, request: ChatCompletionRequest, job: Job, outputs: list[tuple[Choice, TextOutput]]
    ) -> ChatCompletion:
        choices = [
            ChatChoice(
                index=choice.index,
                message=_message(request, output),
                logprobs=self._logprobs(request, output),
                finish_reason=output.finish_reason,
                stop_reason=output.stop_reason,
                token_ids=returned_token_ids(request, output),
                num_nans_in_logits=output.num_nans_in_logits or msgspec.UNSET,
            )
            for choice, output in outputs
        ]
        answer = ChatCompletion(
            id=job.id,
            created=job.created,
            model=self.served_name,
            choices=choices,
            usage=job.usage(),
        )
        if request.prompt_logprobs is not None:
            answer.prompt_logprobs = prompt_token_logprobs(
                self._tokenizer, outputs[0][1].prompt_logprobs or []
            )
        return answer

    def opening_chunks(self, request: ChatCompletionRequest, job: Job) -> list[msgspec.Struct]:
        delta = ChatDelta(role="assistant", content="")
        return [
            self._chunk(request, job, ChatChunkChoice(index=choice.index, delta=delta))
            for choice in job.choices
        ]

    def chunk(
        self,
        request: ChatCompletionRequest,
        job: Job,
        choice: Choice,
        output: TextOutput,
        offset: int,
    ) -> ChatCompletionChunk:
        piece = ChatChunkChoice(
            index=choice.index,
            delta=_delta(request, output),
            logprobs=self._logprobs(request, output) if output.logprobs else None,
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
            token_ids=returned_token_ids(request, output),
            num_nans_in_logits=output.num_nans_in_logits or msgspec.UNSET,
        )
        return self._chunk(request, job, piece)

    def usage_chunk(self, job: Job) -> ChatCompletionChunk:
        return ChatCompletionChunk(
            id=job.id, created=job.created, model=self.served_name, choices=[], usage=job.usage()
        )

    def _chunk(
        self, request: ChatCompletionRequest, job: Job, choice: ChatChunkChoice
    ) -> ChatCompletionChunk:
        usage = None if request.include_usage else msgspec.UNSET
        return ChatCompletionChunk(
            id=job.id, created=job.created, model=self.served_name, choices=[choice], usage=usage
        )

    def _logprobs(self, request: ChatCompletionRequest, output: TextOutput) -> ChatLogprobs | None:
        return chat_logprobs(self._tokenizer, output.logprobs) if request.logprobs else None


def _message(request: ChatCompletionRequest, output: TextOutput) -> ChatResponseMessage:
    """Return the message of a complete choice."""
    if output.reply is None:
        return ChatResponseMessage(content=output.text)
    reply = output.reply
    calls: list[ChatToolCall] = []
    for delta in reply.tool_calls:
        if delta.name is not msgspec.UNSET:
            function = CalledFunctionDelta(name=delta.name, arguments="")
            calls.append(ChatToolCall(id=_call_id(), type="function", function=function))
        calls[delta.index].function.arguments += delta.arguments
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
        delta.id, delta.type = _call_id(), "function"
    return delta


def _call_id() -> str:
    # Templates of Mistral accept ids of nine letters and digits only.
    return secrets.token_hex(5)[:9]
