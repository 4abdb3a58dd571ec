"""`/v1/completions`: the JSON of its responses and chunks."""

from __future__ import annotations

import msgspec

from baton_gateway.http.generation_endpoint import GenerationEndpoint, returned_token_ids
from baton_gateway.requests.job import Choice, Job
from baton_text.output import TextOutput, completion_logprobs, prompt_token_logprobs
from baton_text.requests.completion_request import CompletionRequest
from baton_text.responses import Completion, CompletionChoice, CompletionLogprobs


class CompletionEndpoint(GenerationEndpoint[CompletionRequest]):
    kind = CompletionRequest

    def response(
        self, request: CompletionRequest, job: Job, outputs: list[tuple[Choice, TextOutput]]
    ) -> Completion:
        choices = []
        for choice, output in outputs:
            piece = CompletionChoice(
                index=choice.index,
                text=choice.echo + output.text,
                logprobs=self._logprobs(request, choice, output, 0),
                finish_reason=output.finish_reason,
                stop_reason=output.stop_reason,
                token_ids=returned_token_ids(request, output),
                num_nans_in_logits=output.num_nans_in_logits or msgspec.UNSET,
            )
            if request.prompt_logprobs is not None:
                piece.prompt_logprobs = prompt_token_logprobs(
                    self._tokenizer, output.prompt_logprobs or []
                )
            choices.append(piece)
        return Completion(
            id=job.id,
            created=job.created,
            model=self.served_name,
            choices=choices,
            usage=job.usage(),
        )

    def opening_chunks(self, request: CompletionRequest, job: Job) -> list[msgspec.Struct]:
        if request.logprobs is not None:
            return []  # the echo comes with its logprobs, in the first chunk of each choice
        return [
            self._chunk(request, job, CompletionChoice(index=choice.index, text=choice.echo))
            for choice in job.choices
            if choice.echo
        ]

    def chunk(
        self, request: CompletionRequest, job: Job, choice: Choice, output: TextOutput, offset: int
    ) -> Completion:
        has_prompt = output.prompt_logprobs is not None
        has_logprobs = has_prompt or output.logprobs
        piece = CompletionChoice(
            index=choice.index,
            text=(choice.echo if has_prompt else "") + output.text,
            logprobs=self._logprobs(request, choice, output, offset) if has_logprobs else None,
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
            token_ids=returned_token_ids(request, output),
            num_nans_in_logits=output.num_nans_in_logits or msgspec.UNSET,
        )
        return self._chunk(request, job, piece)

    def usage_chunk(self, job: Job) -> Completion:
        return Completion(
            id=job.id, created=job.created, model=self.served_name, choices=[], usage=job.usage()
        )

    def _chunk(self, request: CompletionRequest, job: Job, choice: CompletionChoice) -> Completion:
        usage = None if request.include_usage else msgspec.UNSET
        return Completion(
            id=job.id, created=job.created, model=self.served_name, choices=[choice], usage=usage
        )

    def _logprobs(
        self, request: CompletionRequest, choice: Choice, output: TextOutput, offset: int
    ) -> CompletionLogprobs | None:
        """Return the logprobs of `output`; None if the request asks for no logprobs.

        If the prompt is echoed, the choice's first output also has the prompt's logprobs.

        Args:
            request: the request.
            choice: the choice to which the output belongs.
            output: new text and tokens of the choice.
            offset: number of characters of the choice's text before this output.
        """
        if request.logprobs is None:
            return None
        tokenizer = self._tokenizer
        if request.echo and output.prompt_logprobs is not None:
            first_token_id = choice.prompt_token_ids[0]
            items = [*output.prompt_logprobs, *output.logprobs]
            return completion_logprobs(tokenizer, items, offset, first_token_id=first_token_id)
        return completion_logprobs(tokenizer, output.logprobs, offset)
