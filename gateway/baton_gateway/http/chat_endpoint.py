"""`/v1/chat/completions`: the JSON of its responses and chunks."""

from __future__ import annotations

import msgspec

from baton_gateway.http.generation_endpoint import GenerationEndpoint, returned_token_ids
from baton_gateway.requests.job import Choice, Job
from baton_text.output import TextOutput, chat_logprobs, prompt_token_logprobs
from baton_text.requests.chat_request import ChatCompletionRequest
from baton_text.responses import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatLogprobs,
    ChatResponseMessage,
)


class ChatEndpoint(GenerationEndpoint[ChatCompletionRequest]):
    kind = ChatCompletionRequest

    def response(
        self, request: ChatCompletionRequest, job: Job, outputs: list[tuple[Choice, TextOutput]]
    ) -> ChatCompletion:
        choices = [
            ChatChoice(
                index=choice.index,
                message=ChatResponseMessage(content=output.text),
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
        is_last = output.finish_reason is not None
        piece = ChatChunkChoice(
            index=choice.index,
            delta=ChatDelta(content=output.text) if output.text or not is_last else ChatDelta(),
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
