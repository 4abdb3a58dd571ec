"""One HTTP request in parts: its prompts, what is dispatched for each, and the choices of its answer."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from baton_gateway.sequences import Sequence
from baton_protocol.messages import PromptLogprobs
from baton_text.output import OutputProcessor
from baton_text.responses import Usage
from baton_text.schema import GenerationRequest


@dataclass
class Choice:
    """One sequence of text that may be part of the answer."""

    index: int
    processor: OutputProcessor
    prompt_token_ids: list[int]
    echo: str = ""


@dataclass
class Run:
    """What is dispatched as one, and the choices it fills: one, or a beam search's beams."""

    sequence: Sequence
    choices: list[Choice]


@dataclass
class PromptJob:
    """One prompt of a request."""

    token_ids: list[int]
    runs: list[Run]
    """The candidates of best_of, in their order; else the samples, or one beam search."""
    logprobs: PromptLogprobs = field(default_factory=list)
    """If they were asked for: the first run brings them, for all."""
    logprobs_known: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def choices(self) -> list[Choice]:
        return [choice for run in self.runs for choice in run.choices]


@dataclass
class Job:
    """One HTTP request, ready to run."""

    id: str
    request: GenerationRequest
    created: int
    started: float
    """Monotonic arrival time."""
    prompts: list[PromptJob]

    @property
    def model(self) -> str:
        return self.request.model

    @property
    def choices(self) -> list[Choice]:
        return [choice for prompt in self.prompts for choice in prompt.choices]

    @property
    def failure(self) -> str:
        """Why one of its sequences has lost an engine; empty if none has."""
        failures = (run.sequence.failure for prompt in self.prompts for run in prompt.runs)
        return next(filter(None, failures), "")

    @property
    def num_entries(self) -> int:
        """Tokens in the answer so far, and log-probabilities of each: how long it takes to write down."""
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
        """Those that are the answer, once all have ended: with best_of the most likely ones, best first."""
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
        """Every prompt counts once, however many samples are drawn from it; every sample counts, also those left out."""
        prompt_tokens = sum(len(prompt.token_ids) for prompt in self.prompts)
        completion_tokens = sum(choice.processor.num_tokens for choice in self.choices)
        cached_tokens = sum(prompt.runs[0].sequence.num_cached_tokens for prompt in self.prompts)
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
            prompt_tokens_details={"cached_tokens": cached_tokens},
        )
