"""One HTTP request as data: its prompts, the runs of each, and the choices of the response."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from baton_gateway.routing.sequence import Sequence
from baton_protocol.messages import EngineCoreOutput, PromptLogprobs
from baton_text.generation_request import GenerationRequest
from baton_text.output import OutputProcessor
from baton_text.responses import Usage


@dataclass
class Choice:
    """One generated text that may be part of the response."""

    index: int
    processor: OutputProcessor
    prompt_token_ids: list[int]
    echo: str = ""


@dataclass
class Run:
    """One dispatched sequence and its choices: one choice, or one per beam."""

    sequence: Sequence
    choices: list[Choice]


@dataclass
class PromptJob:
    """One prompt of a request.

    Args:
        runs: the samples (with best_of, the candidates), or one beam search.
        logprobs: the prompt's log-probabilities, if requested.
        logprobs_known: set when `logprobs` is complete.
    """

    token_ids: list[int]
    runs: list[Run]
    logprobs: PromptLogprobs = field(default_factory=list)
    logprobs_known: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def choices(self) -> list[Choice]:
        return [choice for run in self.runs for choice in run.choices]

    async def share_logprobs(self, run: Run, output: EngineCoreOutput) -> PromptLogprobs:
        """Return the prompt's logprobs, which the first run's first output has for all runs.

        The other runs wait for it. If the first run fails, the job fails.
        """
        if run is self.runs[0]:
            self.logprobs = output.prompt_logprobs or []  # a prompt of one token has none
            self.logprobs_known.set()
        await self.logprobs_known.wait()
        return self.logprobs


@dataclass
class Job:
    """One HTTP request, ready to run.

    Args:
        created: Unix time of the request.
        started: monotonic time of its arrival.
    """

    id: str
    request: GenerationRequest
    created: int
    started: float
    prompts: list[PromptJob]

    @property
    def model(self) -> str:
        return self.request.model

    @property
    def choices(self) -> list[Choice]:
        return [choice for prompt in self.prompts for choice in prompt.choices]

    @property
    def failure(self) -> str:
        """The reason why a sequence of the job lost an engine; empty if none has lost one."""
        failures = (run.sequence.failure for prompt in self.prompts for run in prompt.runs)
        return next(filter(None, failures), "")

    @property
    def num_entries(self) -> int:
        """Tokens and log-probabilities of the response so far: the cost of encoding it."""
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
        """Return the choices of the response once all have ended, and number them.

        With best_of these are the most likely candidates, the best first.
        """
        best: list[Choice] = []
        num_samples = self.request.num_samples
        for index, prompt in enumerate(self.prompts):
            choices = prompt.choices
            if len(choices) > num_samples:
                choices = sorted(
                    choices, key=lambda choice: choice.processor.mean_logprob, reverse=True
                )
            for place, choice in enumerate(choices[:num_samples]):
                choice.index = index * num_samples + place
                best.append(choice)
        return best

    def usage(self) -> Usage:
        """Count the tokens: each prompt once, and every sample, even those best_of drops."""
        prompt_tokens = sum(len(prompt.token_ids) for prompt in self.prompts)
        completion_tokens = sum(choice.processor.num_tokens for choice in self.choices)
        cached_tokens = sum(prompt.runs[0].sequence.num_cached_tokens for prompt in self.prompts)
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
            prompt_tokens_details={"cached_tokens": cached_tokens},
        )
