"""Collects the outputs for clients until the scheduler takes them."""

from __future__ import annotations

import time
from collections import Counter

from baton_engine.executor.step import ModelRunnerOutput
from baton_engine.scheduling.request import Request
from baton_protocol.engine_messages import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    FinishReason,
    RoutedExperts,
)


class RequestOutputs:
    """Collects outputs for clients, with events, prompt logprobs and routed experts.

    No other class writes `Request.report`.
    """

    def __init__(self) -> None:
        #: Number of ended requests by finish reason.
        self.num_finished: Counter[FinishReason] = Counter()
        self._outputs: list[EngineCoreOutput] = []

    def take(self) -> list[EngineCoreOutput]:
        """Remove and return the collected outputs."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def event(self, request: Request, event_type: EngineCoreEventType) -> None:
        """Record an event, which the next output of the request carries."""
        request.report.events.append(EngineCoreEvent(event_type, time.monotonic()))

    def join_optional_outputs(
        self, request: Request, start: int, ran: ModelRunnerOutput, *, ran_as: str
    ) -> None:
        """Collect a step's prompt logprobs and routed experts for the next output with tokens.

        The results are joined to those of the request's earlier steps. `add` moves all collected
        results to the output.

        Args:
            start: position of the first token that the step ran.
            ran: results of the step.
            ran_as: id of the sequence that ran: the request or one of its beams.
        """
        predicted = ran.prompt_logprobs.get(ran_as)
        collected = request.report.prompt_logprobs
        if predicted and collected is not None and len(collected) >= start:
            # After a preemption, positions are predicted again.
            del collected[start:]
            collected += predicted
        experts = ran.routed_experts.get(ran_as)
        if experts is not None:
            request.report.routed_experts.append(experts)

    def add(self, request: Request, output: EngineCoreOutput) -> None:
        """Add `output` to the outputs that `take` returns.

        The output gets the events that were recorded since the request's last output. If it has
        tokens, it also gets the collected prompt logprobs and routed experts.
        """
        report = request.report
        if not report.has_output:
            report.has_output = True
            output.num_cached_tokens = request.num_cached_tokens
        if report.events:
            output.events, report.events = report.events, []
        if output.new_token_ids:
            if report.prompt_logprobs is not None:
                if len(report.prompt_logprobs) == request.num_prompt_tokens - 1:
                    output.prompt_logprobs = report.prompt_logprobs
                report.prompt_logprobs = None
            if report.routed_experts:
                output.routed_experts = RoutedExperts.join(report.routed_experts)
                report.routed_experts = []
        if output.finish_reason is not None:
            self.num_finished[output.finish_reason] += 1
        self._outputs.append(output)
