"""OpenAI's `/v1/completions`: the JSON of its responses and chunks."""

from __future__ import annotations

import msgspec

from baton_gateway.endpoints.writers.chunk_writer import ChunkWriter
from baton_gateway.endpoints.writers.generation_api import GenerationAPI
from baton_gateway.requests.job import Choice, Job
from baton_text.output import TextOutput, completion_logprobs, prompt_token_logprobs
from baton_text.requests.completion_request import CompletionRequest
from baton_text.responses.openai import Completion, CompletionChoice, CompletionLogprobs, Usage


class CompletionAPI(GenerationAPI[CompletionRequest]):
    path = "/v1/completions"
    body = CompletionRequest

    def request(self, body: CompletionRequest, earlier: bytes) -> CompletionRequest:
        return body

    def writer(self, body: CompletionRequest, job: Job, client: str | None) -> CompletionWriter:
        return CompletionWriter(body, job, self._served_name, self._tokenizer)


class CompletionWriter(ChunkWriter[CompletionRequest]):
    def response(self, outputs: list[tuple[Choice, TextOutput]]) -> Completion:
        choices = []
        for choice, output in outputs:
            piece = self._choice(choice, output, choice.echo, self._logprobs(choice, output, 0))
            if self.body.prompt_logprobs is not None:
                piece.prompt_logprobs = prompt_token_logprobs(
                    self.tokenizer, output.prompt_logprobs or []
                )
            choices.append(piece)
        return self._chunk(choices, self.job.usage())

    def opening(self) -> list[msgspec.Struct]:
        if self.body.logprobs is not None:
            return []  # the echo comes with its logprobs, in the first event of each choice
        return [
            self._choice_chunk(CompletionChoice(index=choice.index, text=choice.echo))
            for choice in self.job.choices
            if choice.echo
        ]

    def events(self, choice: Choice, output: TextOutput, offset: int) -> list[msgspec.Struct]:
        has_prompt = output.prompt_logprobs is not None
        has_logprobs = has_prompt or output.logprobs
        logprobs = self._logprobs(choice, output, offset) if has_logprobs else None
        echo = choice.echo if has_prompt else ""
        return [self._choice_chunk(self._choice(choice, output, echo, logprobs))]

    def _chunk(
        self, choices: list[CompletionChoice], usage: Usage | msgspec.UnsetType | None
    ) -> Completion:
        return Completion(
            id=self.job.id,
            created=self.job.created,
            model=self.served_name,
            choices=choices,
            usage=usage,
        )

    def _choice(
        self, choice: Choice, output: TextOutput, echo: str, logprobs: CompletionLogprobs | None
    ) -> CompletionChoice:
        return CompletionChoice(
            index=choice.index,
            text=echo + output.text,
            logprobs=logprobs,
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
            token_ids=self._token_ids(output),
            num_nans_in_logits=output.num_nans_in_logits or msgspec.UNSET,
        )

    def _logprobs(
        self, choice: Choice, output: TextOutput, offset: int
    ) -> CompletionLogprobs | None:
        """Return the logprobs of `output`; None if the request asks for no logprobs.

        If the prompt is echoed, the choice's first output also has the prompt's logprobs.

        Args:
            choice: the choice to which the output belongs.
            output: new text and tokens of the choice.
            offset: number of characters of all tokens whose logprobs were sent before, including
                tokens of an echoed prompt.
        """
        if self.body.logprobs is None:
            return None
        if self.body.echo and output.prompt_logprobs is not None:
            first_token_id = choice.prompt_token_ids[0]
            items = [*output.prompt_logprobs, *output.logprobs]
            return completion_logprobs(self.tokenizer, items, offset, first_token_id=first_token_id)
        return completion_logprobs(self.tokenizer, output.logprobs, offset)
