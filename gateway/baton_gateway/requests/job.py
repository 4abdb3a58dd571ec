"""The data of one HTTP request: its prompts, the sequences to run, the choices of the response."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from functools import cached_property

from baton_gateway.routing.sequence import Sequence
from baton_protocol.engine_messages import EngineCoreOutput, PromptLogprobs
from baton_text.output import OutputProcessor
from baton_text.requests.generation_request import GenerationRequest
from baton_text.responses.openai import Usage


@dataclass
class Choice:
    """One generated text that may be part of the response."""

    #: Number of the choice in the response.
    index: int
    processor: OutputProcessor
    prompt_token_ids: list[int]
    #: Text of the prompt, if the response begins with the prompt; else empty.
    echo: str = ""


@dataclass
class SampleRun:
    """One sequence and its choices: one choice, or one per beam of a beam search."""

    sequence: Sequence
    choices: list[Choice]


@dataclass
class PromptJob:
    """One prompt of a request.

    Args:
        token_ids: token ids of the prompt.
        runs: one run for each sample; with best_of, for each candidate. A beam search is one run.
        logprobs: log-probabilities of the prompt's tokens. Empty if not requested, before they
            arrive, and after all runs have received them.
        logprobs_known: set when the engine has sent `logprobs`.
    """

    token_ids: list[int]
    runs: list[SampleRun]
    logprobs: PromptLogprobs = field(default_factory=list)
    logprobs_known: asyncio.Event = field(default_factory=asyncio.Event)
    _num_shared: int = 0

    @property
    def choices(self) -> list[Choice]:
        return [choice for run in self.runs for choice in run.choices]

    async def share_logprobs(self, run: SampleRun, output: EngineCoreOutput) -> PromptLogprobs:
        """Return the prompt's logprobs for `run`, whose first output is `output`.

        The engine sends them only to the prompt's first run, which stores them from `output`. All
        other runs wait until they are stored. If the first run fails, the job fails.
        """
        if run is self.runs[0]:
            self.logprobs = output.prompt_logprobs or []  # a prompt of one token has none
            self.logprobs_known.set()
        await self.logprobs_known.wait()
        logprobs = self.logprobs
        self._num_shared += 1
        if self._num_shared == len(self.runs):  # free the objects, which take megabytes
            self.logprobs = []
        return logprobs


@dataclass
class Job:
    """One HTTP request, ready to run.

    Args:
        id: id of the request in the response, such as `chatcmpl-1`.
        request: the parsed body.
        created: Unix time of the request, in seconds.
        started: monotonic time at which the request arrived, in seconds.
        prompts: the prompts in the order of the body.
        num_streamed_tokens: number of generated tokens in the chunks of a streamed response so
            far. The engine may already have generated more tokens.
    """

    id: str
    request: GenerationRequest
    created: int
    started: float
    prompts: list[PromptJob]
    num_streamed_tokens: int = 0

    @cached_property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt.token_ids) for prompt in self.prompts)

    @property
    def choices(self) -> list[Choice]:
        return [choice for prompt in self.prompts for choice in prompt.choices]

    @property
    def has_failed(self) -> bool:
        """Whether an attempt to run a sequence of this job has failed."""
        return any(run.sequence.has_failed for prompt in self.prompts for run in prompt.runs)

    @property
    def num_entries(self) -> int:
        """Number of tokens and log-probabilities in the response so far.

        The time to encode the response grows with this number.
        """
        tops, prompt_tops = (
            self.request.requested_logprobs(),
            self.request.requested_prompt_logprobs(),
        )
        entries = 0
        for choice in self.choices:
            entries += choice.processor.num_tokens * (1 if tops is None else 2 + tops)
            if prompt_tops is not None:
                entries += len(choice.prompt_token_ids) * (1 + prompt_tops)
        return entries

    def best_choices(self) -> list[Choice]:
        """Return the choices of the response, and set the index of each choice.

        All choices must have ended. With best_of, the response has the candidates of each prompt
        with the highest mean log-probability, the best first.
        """
        best: list[Choice] = []
        num_samples = self.request.num_samples
        for index, prompt in enumerate(self.prompts):
            choices = prompt.choices
            if len(choices) > num_samples:
                choices = sorted(
                    choices, key=lambda choice: choice.processor.mean_logprob, reverse=True
                )
            for sample, choice in enumerate(choices[:num_samples]):
                choice.index = index * num_samples + sample
                best.append(choice)
        return best

    def usage(self) -> Usage:
        """Return the token counts of the request.

        The tokens of a prompt count once, for any number of samples. The tokens of every sample
        count, including candidates that best_of drops.
        """
        usage = self._usage(sum(choice.processor.num_tokens for choice in self.choices))
        cached_tokens = sum(prompt.runs[0].sequence.num_cached_tokens for prompt in self.prompts)
        usage.prompt_tokens_details = {"cached_tokens": cached_tokens}
        if reasoning := sum(choice.processor.num_reasoning_tokens for choice in self.choices):
            usage.completion_tokens_details = {"reasoning_tokens": reasoning}
        return usage

    def streamed_usage(self) -> Usage:
        """Return the token counts of a streamed response's chunks so far, in constant time."""
        return self._usage(self.num_streamed_tokens)

    def _usage(self, completion_tokens: int) -> Usage:
        return Usage(
            prompt_tokens=self.num_prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=self.num_prompt_tokens + completion_tokens,
        )
