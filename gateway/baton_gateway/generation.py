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
from typing import TypeVar

import msgspec

from baton_engine.protocol.config import AccessConfig
from baton_engine.protocol.messages import EngineCoreOutput, FinishReason
from baton_engine.protocol.sampling import SamplingParams
from baton_engine.text.chat_template import ChatTemplateError
from baton_engine.text.errors import RequestError
from baton_engine.text.messages import template_messages
from baton_engine.text.output import OutputProcessor, TextOutput
from baton_engine.text.responses import DetokenizeResponse, TokenizeResponse
from baton_engine.text.schema import ChatCompletionRequest, CompletionRequest, GenerationRequest
from baton_engine.text.structured_outputs import bad_words_token_ids
from baton_engine.text.tokenize_requests import DetokenizeRequest, TokenizeRequest
from baton_engine.text.tokenizer import Tokenizer
from baton_gateway.dispatch import Dispatcher
from baton_gateway.errors import APIError, bad_request, context_length_exceeded, internal, prompt_too_long, unavailable
from baton_gateway.jobs import Choice, Job, PromptJob, Run
from baton_gateway.metrics import GatewayMetrics
from baton_gateway.pool import EnginePool
from baton_gateway.sequences import SampleGroup, Sequence

logger = logging.getLogger(__name__)

INLINE_CHARS = 4096
"""Longer texts are tokenized in a thread: the event loop must not stand still for other streams."""

GAP_S = 1.0
"""Longer silences of a stream are counted one by one."""

_Result = TypeVar("_Result")


_Event = tuple[Choice, TextOutput] | Exception | None
"""What a run tells: an output, its failure, or that it has ended."""


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
        self._limits = limits
        self._pool = pool
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._running: dict[asyncio.Queue[_Event], Job] = {}

    def fail_all(self) -> None:
        """This gateway ends: so does everything that runs, each with an error. Engines are told to abort."""
        for queue, job in self._running.items():
            lost = f" Its engine was lost before: {job.failure}" if job.failure else ""
            queue.put_nowait(unavailable(f"This gateway shut down before the request ended.{lost}", code="draining"))

    async def prepare_chat(self, request: ChatCompletionRequest, started: float) -> Job:
        """Raises RequestError or APIError: the messages cannot be rendered, do not fit, or nobody can serve them."""
        template = self.tokenizer.chat_template
        if template is None:
            raise RequestError(
                "This model has no chat template; use /v1/completions, or add chat_template.jinja to the checkpoint.",
                param="messages",
            )
        messages = request.template_messages()
        variables = request.chat_template_kwargs or {}
        reserved = {"messages", "add_generation_prompt"} & variables.keys()
        if reserved:
            name = f"chat_template_kwargs.{min(reserved)}"
            raise RequestError(f"{name} cannot be set: it is a field of the request", param=name)

        limit = self._pool.max_model_len

        def tokenize() -> list[int]:
            add_prompt = request.add_generation_prompt is not False
            text = template.render(messages, add_generation_prompt=add_prompt, **variables)
            return self._encode(text, "messages", limit, add_special_tokens=False)

        try:
            token_ids = await _offload(tokenize, sum(len(message["content"]) for message in messages))
        except ChatTemplateError as error:
            raise RequestError(f"The chat template refuses these messages: {error}", param="messages") from error
        bad_words = await self._bad_words(request)
        return self._job(request, "chatcmpl", [token_ids], [""], bad_words, "messages", started)

    async def prepare_completion(self, request: CompletionRequest, started: float) -> Job:
        """Raises RequestError or APIError: a prompt cannot be used, does not fit, or nobody can serve it."""
        add_special = request.add_special_tokens is not False
        prompts = request.prompts()
        limit = self._pool.max_model_len

        def tokenize(prompt: str | list[int]) -> list[int]:
            if isinstance(prompt, str):
                return self._encode(prompt, "prompt", limit, add_special_tokens=add_special)
            self._check_ids(prompt, "prompt")
            return prompt

        def echo(prompt: str | list[int]) -> str:
            if not request.echo:
                return ""
            return prompt if isinstance(prompt, str) else self.tokenizer.decode(prompt)

        token_ids, echoes = await _offload(
            lambda: ([tokenize(prompt) for prompt in prompts], [echo(prompt) for prompt in prompts]),
            sum(map(len, prompts)),  # together: many short prompts take as long as one long one
        )
        bad_words = await self._bad_words(request)
        return self._job(request, "cmpl", token_ids, echoes, bad_words, "prompt", started)

    async def tokenize(self, request: TokenizeRequest) -> TokenizeResponse:
        """Token ids of a prompt or of rendered messages, as a generation request would use them. Raises RequestError."""
        text, add_special = request.prompt, request.add_special_tokens is not False
        if request.messages is not None:
            if self.tokenizer.chat_template is None:
                raise RequestError("This model has no chat template; send a prompt instead.", param="messages")
            add_special = bool(request.add_special_tokens)  # the template writes them
            try:
                text = self.tokenizer.chat_template.render(
                    template_messages(request.messages),
                    add_generation_prompt=request.add_generation_prompt is not False,
                    **(request.chat_template_kwargs or {}),
                )
            except ChatTemplateError as error:
                raise RequestError(f"The chat template refuses these messages: {error}", param="messages") from error
        if text is None:
            raise RequestError("prompt or messages is required", param="prompt", code="missing_required_parameter")
        prompt = text
        token_ids = await _offload(lambda: self.tokenizer.encode(prompt, add_special_tokens=add_special), len(prompt))
        response = TokenizeResponse(count=len(token_ids), tokens=token_ids, max_model_len=self._pool.max_model_len)
        if request.return_token_strs:
            response.token_strs = [self.tokenizer.decode([i], skip_special_tokens=False) for i in token_ids]
        return response

    async def detokenize(self, request: DetokenizeRequest) -> DetokenizeResponse:
        """Raises RequestError: ids outside the vocabulary."""
        self._check_ids(request.tokens, "tokens")
        text = await _offload(
            lambda: self.tokenizer.decode(request.tokens, skip_special_tokens=False), len(request.tokens)
        )
        return DetokenizeResponse(prompt=text)

    async def run(self, job: Job) -> AsyncGenerator[tuple[Choice, TextOutput], None]:
        """Outputs of all choices as they come; of each, in order up to the finished one.

        Closing early aborts what still runs.

        Raises:
            APIError: one of the sequences failed; the others are aborted.
        """
        queue: asyncio.Queue[_Event] = asyncio.Queue()
        runs = [(prompt, run) for prompt in job.prompts for run in prompt.runs]
        tasks = [asyncio.create_task(self._run(job, prompt, run, queue)) for prompt, run in runs]
        unfinished = len(tasks)
        self._running[queue] = job
        try:
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

    async def _run(self, job: Job, prompt: PromptJob, run: Run, queue: asyncio.Queue[_Event]) -> None:
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
                            self._metrics.inter_token_latency.observe((now - last) / len(output.new_token_ids))
                            if now - last > GAP_S:
                                self._metrics.stream_gap.observe(now - last)
                        last, first = now, False
                        self._metrics.generation_tokens.inc(len(output.new_token_ids))
                    if output.beams is not None:
                        _push_beams(job, run, output, queue)
                        break
                    if first_token and job.request.requested_prompt_logprobs() is not None:
                        if run is prompt.runs[0]:
                            prompt.logprobs = output.prompt_logprobs or []  # a prompt of one token has none
                            prompt.logprobs_known.set()
                        await prompt.logprobs_known.wait()  # if the first run fails, all do
                        output.prompt_logprobs = prompt.logprobs
                    if prompt_only:
                        reason = FinishReason.LENGTH if output.finished else None
                        output = EngineCoreOutput(
                            output.request_id, [], finish_reason=reason, prompt_logprobs=output.prompt_logprobs
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

    def _job(
        self,
        request: GenerationRequest,
        prefix: str,
        prompts: list[list[int]],
        echoes: list[str],
        bad_words: list[list[int]],
        field: str,
        started: float,
    ) -> Job:
        self._check_rank(request.data_parallel_rank)
        job_id = f"{prefix}-{uuid.uuid4().hex}"
        arrival = time.time()
        self._check_ids(request.allowed_token_ids or [], "allowed_token_ids")
        request.check_prompt_logprobs(sum(map(len, prompts)))
        jobs = []
        for prompt_index, token_ids in enumerate(prompts):
            max_tokens = self._max_tokens(request, len(token_ids), field)
            # A seed of the client's own is the same for all prompts; of equal prompts it makes equal answers.
            seed = secrets.randbits(63) if request.seed is None else request.seed
            params = request.sampling_params(seed=seed, max_tokens=max_tokens, bad_words_token_ids=bad_words)
            self._check_ids(list(params.logit_bias or {}), "logit_bias")
            self._check_ids(params.stop_token_ids, "stop_token_ids")
            self._metrics.prompt_tokens.inc(len(token_ids))
            first_index = prompt_index * request.num_candidates
            choices = [
                Choice(first_index + index, self._processor(request, params), token_ids, echoes[prompt_index])
                for index in range(request.num_candidates)
            ]
            num_runs = 1 if params.beam_width else request.num_candidates
            group = SampleGroup(f"{job_id}-p{prompt_index}") if num_runs > 1 else None
            silent = msgspec.structs.replace(params, prompt_logprobs=None)
            runs = []
            for sample_index in range(num_runs):
                sequence = Sequence(
                    request_id=job_id if len(prompts) * num_runs == 1 else f"{job_id}-c{first_index + sample_index}",
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
                runs.append(Run(sequence, choices if params.beam_width else [choices[sample_index]]))
            jobs.append(PromptJob(token_ids, runs))
        return Job(job_id, request, int(arrival), started, jobs)

    async def _bad_words(self, request: GenerationRequest) -> list[list[int]]:
        words = request.bad_words or []
        return await _offload(lambda: bad_words_token_ids(self.tokenizer, words), sum(map(len, words)))

    def _processor(self, request: GenerationRequest, params: SamplingParams) -> OutputProcessor:
        return OutputProcessor(
            self.tokenizer,
            stops=request.stops,
            include_stop=bool(request.include_stop_str_in_output),
            skip_special_tokens=request.skip_special_tokens is not False,
            min_tokens=params.min_tokens,
            stop_token_ids=params.stop_token_ids,
        )

    def _encode(self, text: str, field: str, limit: int | None, *, add_special_tokens: bool) -> list[int]:
        fewest = self.tokenizer.fewest_tokens(text)
        if limit is not None and fewest >= limit:
            raise prompt_too_long(limit, fewest, field)
        self._check_prompt(fewest, field)  # before it costs anything, and again when it is known
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def _max_tokens(self, request: GenerationRequest, prompt_len: int, field: str) -> int:
        """Tokens to generate at most, so that prompt and answer fit the model."""
        if prompt_len == 0:
            raise RequestError(f"{field} must not be empty", param=field)
        self._check_prompt(prompt_len, field)
        limit = self._pool.max_model_len
        if limit is None:
            raise unavailable("No decode engine is ready; retry later.", code="no_ready_engine")
        requested = request.requested_max_tokens()
        explicit = request.max_tokens is not None or getattr(request, "max_completion_tokens", None) is not None
        needed = requested if requested is not None and explicit else 1
        if prompt_len + needed > limit:
            raise context_length_exceeded(limit, prompt_len, needed, field)
        room, most = limit - prompt_len, self._limits.max_completion_tokens
        if most is not None:
            if explicit and needed > most:
                raise RequestError(f"this server generates {most} tokens at most, got {needed}", param="max_tokens")
            room = min(room, most)
        return room if requested is None else min(requested, room)

    def _check_prompt(self, num_tokens: int, field: str) -> None:
        most = self._limits.max_prompt_tokens
        if most is not None and num_tokens > most:
            message = f"this server takes prompts of {most} tokens at most, got {num_tokens} or more"
            raise RequestError(message, param=field, code="prompt_too_long")

    def _check_rank(self, rank: int | None) -> None:
        size = self._pool.data_parallel_size
        if rank is not None and self._pool.decode_seen and not 0 <= rank < size:
            raise RequestError(
                f"data_parallel_rank must be in [0, {size - 1}], got {rank}: the decode engines are {size} ranks",
                param="data_parallel_rank",
            )

    def _check_ids(self, token_ids: list[int], field: str) -> None:
        vocab_size = self.tokenizer.vocab_size
        wrong = next((token_id for token_id in token_ids if not 0 <= token_id < vocab_size), None)
        if wrong is not None:
            raise RequestError(f"{field}: token ids must be in [0, {vocab_size - 1}], got {wrong}", param=field)


def _push_beams(job: Job, run: Run, output: EngineCoreOutput, queue: asyncio.Queue[_Event]) -> None:
    """The beams, best first, as choices. A search may end with fewer than its width: then the answer has fewer, too."""
    beams = output.beams or []
    del run.choices[len(beams) :]
    for choice, beam in zip(run.choices, beams, strict=False):
        result = choice.processor.push_beam(run.sequence.request_id, beam)
        if job.request.requested_prompt_logprobs() is not None:
            result.prompt_logprobs = output.prompt_logprobs or []
        queue.put_nowait((choice, result))


async def _offload(work: Callable[[], _Result], num_chars: int) -> _Result:
    """Runs `work` here when it is short, else in a thread."""
    if num_chars <= INLINE_CHARS:
        return work()
    return await asyncio.to_thread(work)
