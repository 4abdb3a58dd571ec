"""One HTTP request as sequences: tokenize, check lengths, run them side by side, give back text.

A request of `n` samples of several prompts is one sequence per (prompt, sample); a beam search is one sequence per prompt, whose
beams become choices at its end.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial

import msgspec

from baton_gateway.dispatch import Dispatcher
from baton_gateway.errors import (
    APIError,
    bad_request,
    context_length_exceeded,
    internal,
    unavailable,
)
from baton_gateway.jobs import Choice, Job, PromptJob, Run
from baton_gateway.metrics import GatewayMetrics
from baton_gateway.pool import EnginePool
from baton_gateway.prompts import PromptBounds, PromptReader
from baton_gateway.sequences import SampleGroup, Sequence
from baton_gateway.workers import offload
from baton_protocol.config import AccessConfig
from baton_protocol.messages import EngineCoreOutput, FinishReason
from baton_protocol.sampling import SamplingParams
from baton_text.errors import RequestError
from baton_text.output import OutputProcessor, TextOutput
from baton_text.schema import ChatCompletionRequest, CompletionRequest, GenerationRequest
from baton_text.structured_outputs import bad_words_token_ids
from baton_text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

INLINE_TOKENS = 64
"""Of beams, which come all at once: more are detokenized in a thread."""
STAGGERED_TOKENS = 2**16
"""So many tokens of prompts and options are sent to engines at a time: writing them down is the event loop's time."""
SEQUENCE_TOKENS = 2**11
"""What a sequence costs besides, in the same measure."""
MAX_OPTION_ENTRIES = 2**22
"""Of logit_bias, or of allowed_token_ids, in all sequences of a request: each goes to its engine with a copy."""
MAX_UNREAD_OUTPUTS = 4096
"""Per choice. Outputs of engines that a client has yet to take: text for a minute at least, and some megabytes."""

GAP_S = 1.0
"""Longer silences of a stream are counted one by one."""

_Event = tuple[Choice, TextOutput] | Exception | None
"""What a run tells: an output, its failure, or that it has ended."""


class _Events(asyncio.Queue[_Event]):
    """What is yet to be taken of one request; `on_backlog` is called with every event beyond `most`."""

    def __init__(self, most: int, on_backlog: Callable[[], None] | None) -> None:
        super().__init__()
        self._most = most
        self._on_backlog = on_backlog

    def put_nowait(self, item: _Event) -> None:
        super().put_nowait(item)
        if self._on_backlog is not None and self.qsize() > self._most:
            self._on_backlog()


class GenerationService:
    """What both endpoints have in common, apart from their JSON."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        pool: EnginePool,
        dispatcher: Dispatcher,
        metrics: GatewayMetrics,
        limits: AccessConfig,
    ) -> None:
        self.tokenizer = tokenizer
        self._reader = PromptReader(tokenizer)
        self._limits = limits
        self._pool = pool
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._running: dict[_Events, Job] = {}

    @property
    def max_model_len(self) -> int | None:
        """None: no engine has told yet."""
        return self._pool.max_model_len

    def fail_all(self) -> None:
        """This gateway ends: so does everything that runs, each with an error. Engines are told to abort."""
        for queue, job in self._running.items():
            lost = f" Its engine was lost before: {job.failure}" if job.failure else ""
            queue.put_nowait(
                unavailable(
                    f"This gateway shut down before the request ended.{lost}", code="draining"
                )
            )

    async def prepare_chat(self, request: ChatCompletionRequest, started: float, size: int) -> Job:
        """
        Args:
            size: bytes of the request's body: how long all this may take.

        Raises:
            RequestError or APIError: the messages cannot be rendered, do not fit, or nobody can serve them.
        """
        self._check_rank(request.data_parallel_rank)
        bounds = self._bounds()
        return await offload(lambda: self._chat_job(request, started, bounds), size)

    def _chat_job(
        self, request: ChatCompletionRequest, started: float, bounds: PromptBounds
    ) -> Job:
        variables = request.chat_template_kwargs or {}
        reserved = {"messages", "add_generation_prompt"} & variables.keys()
        if reserved:
            name = f"chat_template_kwargs.{min(reserved)}"
            raise RequestError(f"{name} cannot be set: it is a field of the request", param=name)
        add_generation_prompt = request.add_generation_prompt is not False
        text = self._reader.render(
            request.messages, variables, bounds, add_generation_prompt=add_generation_prompt
        )
        token_ids = self._reader.encode(text, "messages", bounds, add_special_tokens=False)
        return self._job(request, "chatcmpl", [token_ids], [""], "messages", started, bounds)

    async def prepare_completion(
        self, request: CompletionRequest, started: float, size: int
    ) -> Job:
        """As `prepare_chat`, of a prompt or several."""
        self._check_rank(request.data_parallel_rank)
        bounds = self._bounds()
        return await offload(lambda: self._completion_job(request, started, bounds), size)

    def _completion_job(
        self, request: CompletionRequest, started: float, bounds: PromptBounds
    ) -> Job:
        prompts = request.prompts()
        add_special = request.add_special_tokens is not False
        token_ids: list[list[int]] = []
        for prompt in prompts:
            if isinstance(prompt, str):
                token_ids.append(
                    self._reader.encode(prompt, "prompt", bounds, add_special_tokens=add_special)
                )
            else:
                self._reader.check_ids(prompt, "prompt")
                token_ids.append(prompt)
        echoes = [""] * len(prompts)
        if request.echo:
            echoes = [
                prompt if isinstance(prompt, str) else self.tokenizer.decode(prompt)
                for prompt in prompts
            ]
        return self._job(request, "cmpl", token_ids, echoes, "prompt", started, bounds)

    async def run(
        self, job: Job, on_backlog: Callable[[], None] | None = None
    ) -> AsyncGenerator[tuple[Choice, TextOutput], None]:
        """Outputs of all choices as they come; of each, in order up to the finished one.

        Closing early aborts what still runs.

        Args:
            on_backlog: called with every output that comes while MAX_UNREAD_OUTPUTS per choice wait to be taken.

        Raises:
            APIError: one of the sequences failed; the others are aborted.
        """
        queue = _Events(MAX_UNREAD_OUTPUTS * len(job.choices), on_backlog)
        runs = [(prompt, run) for prompt in job.prompts for run in prompt.runs]
        tasks: list[asyncio.Task[None]] = []
        unfinished, num_tokens, num_options = len(runs), 0, _num_options(job.request)
        self._running[queue] = job
        try:
            for prompt, run in runs:
                tasks.append(asyncio.create_task(self._run(job, prompt, run, queue)))
                num_tokens += len(prompt.token_ids) + num_options + SEQUENCE_TOKENS
                if num_tokens > STAGGERED_TOKENS:
                    num_tokens = 0
                    await asyncio.sleep(0)
            while unfinished:
                event = await queue.get()
                if isinstance(event, Exception):
                    raise event
                if event is None:
                    unfinished -= 1
                else:
                    yield event
        finally:
            del self._running[queue]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._metrics.e2e_latency.observe(time.monotonic() - job.started)

    async def _run(self, job: Job, prompt: PromptJob, run: Run, queue: _Events) -> None:
        last = job.started
        first = True
        prompt_only = isinstance(job.request, CompletionRequest) and job.request.is_prompt_only
        try:
            async with aclosing(self._dispatcher.generate(run.sequence)) as outputs:
                async for output in outputs:
                    first_token = first and bool(output.new_token_ids)
                    if output.new_token_ids:
                        now = time.monotonic()
                        if first:
                            self._metrics.time_to_first_token.observe(now - last)
                        else:
                            self._metrics.inter_token_latency.observe(
                                (now - last) / len(output.new_token_ids)
                            )
                            if now - last > GAP_S:
                                self._metrics.stream_gap.observe(now - last)
                        last, first = now, False
                        self._metrics.generation_tokens.inc(len(output.new_token_ids))
                    if output.beams is not None:
                        size = sum(len(beam.token_ids) for beam in output.beams)
                        for event in await offload(
                            partial(_beams, job, run, output), size, INLINE_TOKENS
                        ):
                            queue.put_nowait(event)
                        break
                    if first_token and job.request.requested_prompt_logprobs() is not None:
                        if run is prompt.runs[0]:
                            prompt.logprobs = (
                                output.prompt_logprobs or []
                            )  # a prompt of one token has none
                            prompt.logprobs_known.set()
                        await prompt.logprobs_known.wait()  # if the first run fails, all do
                        output.prompt_logprobs = prompt.logprobs
                    if prompt_only:
                        reason = FinishReason.LENGTH if output.finished else None
                        output = EngineCoreOutput(
                            output.request_id,
                            [],
                            finish_reason=reason,
                            prompt_logprobs=output.prompt_logprobs,
                        )
                    [choice] = run.choices
                    result = choice.processor.push(output)
                    queue.put_nowait((choice, result))
                    if result.finish_reason is not None:
                        break
            queue.put_nowait(None)
        except APIError as error:
            if error.status == 400 and error.code is None:  # the engine's words
                error = bad_request(job.request.refusal(error.message))
            queue.put_nowait(error)
        except Exception as error:  # a bug here must not leave the client waiting for ever
            logger.exception("request %s: %s failed", job.id, run.sequence.request_id)
            queue.put_nowait(internal(f"The gateway failed: {error!r}"))

    def _bounds(self) -> PromptBounds:
        """Raises APIError: no engine has told yet what fits it."""
        limit = self._pool.max_model_len
        if limit is None:
            raise unavailable("No decode engine is ready; retry later.", code="no_ready_engine")
        return PromptBounds(limit, self._limits.max_prompt_tokens)

    def _job(
        self,
        request: GenerationRequest,
        prefix: str,
        prompts: list[list[int]],
        echoes: list[str],
        field: str,
        started: float,
        bounds: PromptBounds,
    ) -> Job:
        job_id = f"{prefix}-{uuid.uuid4().hex}"
        arrival = time.time()
        _check_options(request)
        self._reader.check_ids(request.allowed_token_ids or [], "allowed_token_ids")
        request.check_prompt_logprobs(sum(map(len, prompts)))
        lengths = [
            self._max_tokens(request, len(token_ids), field, bounds) for token_ids in prompts
        ]
        params_of = self._params(request, set(lengths))
        jobs = []
        for prompt_index, token_ids in enumerate(prompts):
            # A seed of the client's own is the same for all prompts; of equal prompts it makes equal answers.
            seed = secrets.randbits(63) if request.seed is None else request.seed
            params = msgspec.structs.replace(params_of[lengths[prompt_index]], seed=seed)
            self._metrics.prompt_tokens.inc(len(token_ids))
            first_index = prompt_index * request.num_candidates
            choices = [
                Choice(
                    first_index + index,
                    self._processor(request, params),
                    token_ids,
                    echoes[prompt_index],
                )
                for index in range(request.num_candidates)
            ]
            num_runs = 1 if params.beam_width else request.num_candidates
            group = SampleGroup(f"{job_id}-p{prompt_index}") if num_runs > 1 else None
            silent = msgspec.structs.replace(params, prompt_logprobs=None)
            runs = []
            for sample_index in range(num_runs):
                sequence = Sequence(
                    request_id=job_id
                    if len(prompts) * num_runs == 1
                    else f"{job_id}-c{first_index + sample_index}",
                    prompt_token_ids=token_ids,
                    # One of them tells what the prompt's tokens were worth; the others share its blocks.
                    sampling_params=params if sample_index == 0 else silent,
                    sample_index=sample_index,
                    arrival_time=arrival,
                    priority=request.priority or 0,
                    cache_salt=request.cache_salt or "",
                    group=group,
                    data_parallel_rank=request.data_parallel_rank,
                )
                runs.append(
                    Run(sequence, choices if params.beam_width else [choices[sample_index]])
                )
            jobs.append(PromptJob(token_ids, runs))
        return Job(job_id, request, int(arrival), started, jobs)

    def _params(self, request: GenerationRequest, lengths: set[int]) -> dict[int, SamplingParams]:
        """By max_tokens, checked: prompts share their options, which may be long lists. Raises RequestError."""
        bad_words = bad_words_token_ids(self.tokenizer, request.bad_words or [])
        params_of = {
            max_tokens: request.sampling_params(
                seed=request.seed or 0, max_tokens=max_tokens, bad_words_token_ids=bad_words
            )
            for max_tokens in lengths
        }
        for params in params_of.values():
            self._reader.check_ids(list(params.logit_bias or {}), "logit_bias")
            self._reader.check_ids(params.stop_token_ids, "stop_token_ids")
        return params_of

    def _processor(self, request: GenerationRequest, params: SamplingParams) -> OutputProcessor:
        return OutputProcessor(
            self.tokenizer,
            stops=request.stops,
            include_stop=bool(request.include_stop_str_in_output),
            skip_special_tokens=request.skip_special_tokens is not False,
            min_tokens=params.min_tokens,
            stop_token_ids=params.stop_token_ids,
        )

    def _max_tokens(
        self, request: GenerationRequest, prompt_len: int, field: str, bounds: PromptBounds
    ) -> int:
        """Tokens to generate at most, so that prompt and answer fit the model."""
        if prompt_len == 0:
            raise RequestError(f"{field} must not be empty", param=field)
        bounds.check_own(prompt_len, field)
        requested = request.requested_max_tokens()
        explicit = (
            request.max_tokens is not None
            or getattr(request, "max_completion_tokens", None) is not None
        )
        needed = requested if requested is not None and explicit else 1
        if prompt_len + needed > bounds.max_model_len:
            raise context_length_exceeded(bounds.max_model_len, prompt_len, needed, field)
        room, most = bounds.max_model_len - prompt_len, self._limits.max_completion_tokens
        if most is not None:
            if explicit and needed > most:
                raise RequestError(
                    f"this server generates {most} tokens at most, got {needed}", param="max_tokens"
                )
            room = min(room, most)
        return room if requested is None else min(requested, room)

    def _check_rank(self, rank: int | None) -> None:
        size = self._pool.data_parallel_size
        if rank is not None and self._pool.decode_seen and not 0 <= rank < size:
            raise RequestError(
                f"data_parallel_rank must be in [0, {size - 1}], got {rank}: the decode engines are {size} ranks",
                param="data_parallel_rank",
            )


def _num_options(request: GenerationRequest) -> int:
    """Entries of the lists that go to an engine with every sequence."""
    return len(request.logit_bias or ()) + len(request.allowed_token_ids or ())


def _check_options(request: GenerationRequest) -> None:
    """Raises RequestError: lists that go to the engines with every sequence are too long for so many sequences."""
    for name in ("logit_bias", "allowed_token_ids"):
        entries = len(getattr(request, name) or ())
        if entries * request.num_sequences > MAX_OPTION_ENTRIES:
            raise RequestError(
                f"{name} has {entries} entries, which {request.num_sequences} sequences make more than "
                f"{MAX_OPTION_ENTRIES}; send fewer sequences at once",
                param=name,
            )


def _beams(job: Job, run: Run, output: EngineCoreOutput) -> list[tuple[Choice, TextOutput]]:
    """The beams, best first, as choices. A search may end with fewer than its width: then the answer has fewer, too."""
    beams = output.beams or []
    del run.choices[len(beams) :]
    results = []
    for choice, beam in zip(run.choices, beams, strict=False):
        result = choice.processor.push_beam(run.sequence.request_id, beam)
        if job.request.requested_prompt_logprobs() is not None:
            result.prompt_logprobs = output.prompt_logprobs or []
        results.append((choice, result))
    return results
