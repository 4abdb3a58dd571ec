"""Runs the sequences of one HTTP request (a `Job`) concurrently, and yields their text."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import Any, TypeVar

from baton_gateway.errors import (
    APIError,
    EngineRefusalError,
    bad_request,
    gateway_failure,
    see_log,
    unavailable,
)
from baton_gateway.metrics import GatewayMetrics, TokenTimer
from baton_gateway.requests.job import Choice, Job, PromptJob, SampleRun
from baton_gateway.requests.output_queue import OutputQueue
from baton_gateway.routing.dispatcher import Dispatcher
from baton_gateway.routing.sequence import Sequence
from baton_gateway.thread_pool import run_encoding
from baton_protocol.engine_messages import EngineCoreOutput, FinishReason
from baton_text.output import TextOutput
from baton_text.requests.generation_request import GenerationRequest

logger = logging.getLogger(__name__)

#: Beams with more tokens than this in total are detokenized in a thread.
INLINE_TOKENS = 64
#: After encoding engine requests with this many prompt tokens and option entries, the event loop
#: runs other tasks.
STAGGERED_TOKENS = 2**16
#: Fixed cost of sending one sequence. The unit is the cost of encoding one token.
SEQUENCE_TOKENS = 2**11

_Result = TypeVar("_Result")


class Generator:
    """Runs the sequences of jobs on engines.

    With best_of, all candidates run. `Job.best_choices` then selects the choices of the response.
    """

    def __init__(self, dispatcher: Dispatcher, metrics: GatewayMetrics) -> None:
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._running: dict[OutputQueue, Job] = {}

    def fail_all(self) -> None:
        """End every running job with an error, because the gateway shuts down.

        The engines receive ABORT for the sequences of these jobs.
        """
        for queue, job in self._running.items():
            earlier = f" An earlier attempt failed. {see_log(job.id)}" if job.has_failed else ""
            queue.fail(
                unavailable(
                    f"This gateway shut down before the request ended.{earlier}", code="draining"
                )
            )

    async def run(
        self, job: Job, on_output: Callable[[int, int], None]
    ) -> AsyncGenerator[tuple[Choice, TextOutput], None]:
        """Run all sequences of `job`, and yield each output with its choice as soon as it arrives.

        The outputs of one choice stay in order. Closing the iterator early aborts the sequences
        that still run.

        Args:
            job: the request's job.
            on_output: called after every output with two numbers: outputs not yet yielded, and
                log-probabilities in these outputs.

        Raises:
            APIError: one sequence failed. The other sequences are aborted.
        """
        queue = OutputQueue()
        num_unfinished = sum(len(prompt.runs) for prompt in job.prompts)
        self._running[queue] = job
        work = (
            (run.sequence, self._run(job, prompt, run, queue, on_output))
            for prompt in job.prompts
            for run in prompt.runs
        )
        try:
            async with sequence_tasks(work):
                while num_unfinished:
                    output = await queue.get()
                    if output is None:
                        num_unfinished -= 1
                    else:
                        yield output
        finally:
            del self._running[queue]
            self._metrics.e2e_latency.observe(time.monotonic() - job.started)

    async def _run(
        self,
        job: Job,
        prompt: PromptJob,
        run: SampleRun,
        queue: OutputQueue,
        on_output: Callable[[int, int], None],
    ) -> None:
        """Run the sequence of `run`, and put its texts, then its end or failure, into `queue`."""
        try:
            timer = TokenTimer(self._metrics, job.started)
            needs_prompt_logprobs = job.request.requested_prompt_logprobs() is not None
            async with aclosing(self._dispatcher.generate(run.sequence)) as outputs:
                async for output in outputs:
                    if output.new_token_ids:
                        timer.on_tokens(len(output.new_token_ids))
                    if needs_prompt_logprobs and (output.new_token_ids or output.beams):
                        needs_prompt_logprobs = False
                        output.prompt_logprobs = await prompt.share_logprobs(run, output)
                    texts = await _texts(job.request, run, output)
                    output.prompt_logprobs = None  # `output` stays in memory until the next output
                    for choice, text in texts:
                        queue.put(choice, text)
                        on_output(queue.num_outputs, queue.num_logprobs)
                    if any(text.finish_reason is not None for _, text in texts):
                        break
            queue.end_sequence()
        except EngineRefusalError as error:
            queue.fail(bad_request(job.request.refusal(error.message)))
        except APIError as error:
            queue.fail(error)
        except Exception:  # a bug must not leave the client waiting
            logger.exception(
                "request %s: sequence %s failed in the gateway, and the client gets an error",
                job.id,
                run.sequence.request_id,
            )
            queue.fail(gateway_failure(run.sequence.request_id))


@asynccontextmanager
async def sequence_tasks(
    work: Iterable[tuple[Sequence, Coroutine[Any, Any, _Result]]],
) -> AsyncIterator[list[asyncio.Task[_Result]]]:
    """Start a task for each coroutine of `work`, and yield the tasks.

    Each coroutine runs the sequence that is paired with it. At the end of the `with` block,
    unfinished tasks are cancelled.
    """
    tasks: list[asyncio.Task[_Result]] = []
    num_tokens = 0
    try:
        for sequence, coroutine in work:
            tasks.append(asyncio.create_task(coroutine))
            num_tokens += len(sequence.prompt_token_ids) + _num_options(sequence) + SEQUENCE_TOKENS
            if num_tokens > STAGGERED_TOKENS:
                num_tokens = 0
                await asyncio.sleep(0)
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _num_options(sequence: Sequence) -> int:
    """Return the number of entries of logit_bias and allowed_token_ids together."""
    params = sequence.sampling_params
    return len(params.logit_bias or ()) + len(params.allowed_token_ids or ())


async def _texts(
    request: GenerationRequest, run: SampleRun, output: EngineCoreOutput
) -> list[tuple[Choice, TextOutput]]:
    """Convert an engine output of `run` to text, and return pairs of (choice, text).

    A beam search gives one pair for each beam. Otherwise the result has one pair.
    """
    if output.beams is not None:
        size = sum(len(beam.token_ids) for beam in output.beams)
        return await run_encoding(partial(_beams, run, output), size, INLINE_TOKENS)
    if request.is_prompt_only:  # the response has only the prompt, without the generated token
        output = EngineCoreOutput(
            output.request_id,
            [],
            finish_reason=FinishReason.LENGTH if output.finished else None,
            prompt_logprobs=output.prompt_logprobs,
        )
    [choice] = run.choices
    return [(choice, choice.processor.push(output))]


def _beams(run: SampleRun, output: EngineCoreOutput) -> list[tuple[Choice, TextOutput]]:
    """Return a pair (choice, text) for each beam in `output`, the best beam first.

    A search may end with fewer beams than the requested beam width. The choices without a beam are
    then removed from `run`.
    """
    beams = output.beams or []
    del run.choices[len(beams) :]
    texts = [
        (choice, choice.processor.push_beam(run.sequence.request_id, beam))
        for choice, beam in zip(run.choices, beams, strict=False)
    ]
    for _, text in texts:
        text.prompt_logprobs = output.prompt_logprobs
    return texts
