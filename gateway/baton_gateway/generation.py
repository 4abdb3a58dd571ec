"""One HTTP request as sequences: tokenize, check lengths, run them side by side, give back text.

A request of `n` samples of several prompts is one sequence per (prompt, sample), each dispatched by itself.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

from baton_engine.text.chat_template import ChatTemplateError
from baton_engine.text.responses import Usage
from baton_engine.text.schema import ChatCompletionRequest, CompletionRequest, GenerationRequest, RequestError
from baton_engine.text.tokenizer import Tokenizer
from baton_gateway.dispatch import Dispatcher, Sequence
from baton_gateway.errors import APIError, context_length_exceeded, internal, prompt_too_long, unavailable
from baton_gateway.metrics import GatewayMetrics
from baton_gateway.output import OutputProcessor, TextOutput
from baton_gateway.pool import EnginePool

logger = logging.getLogger(__name__)

INLINE_CHARS = 4096
"""Longer texts are tokenized in a thread: the event loop must not stand still for other streams."""

_Result = TypeVar("_Result")


@dataclass
class Choice:
    """One sequence of the answer."""

    index: int
    sequence: Sequence
    processor: OutputProcessor
    echo: str = ""


@dataclass
class Job:
    """One HTTP request, ready to run."""

    id: str
    model: str
    created: int
    started: float
    """Monotonic arrival time."""
    choices: list[Choice]
    num_prompts: int

    def usage(self) -> Usage:
        """Every prompt counts once, however many samples are drawn from it."""
        per_prompt = len(self.choices) // self.num_prompts
        firsts = self.choices[::per_prompt]
        prompt_tokens = sum(len(choice.sequence.prompt_token_ids) for choice in firsts)
        completion_tokens = sum(choice.processor.num_tokens for choice in self.choices)
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
            prompt_tokens_details={"cached_tokens": sum(choice.sequence.num_cached_tokens for choice in firsts)},
        )


class GenerationService:
    """What both endpoints have in common, apart from their JSON."""

    def __init__(self, tokenizer: Tokenizer, pool: EnginePool, dispatcher: Dispatcher, metrics: GatewayMetrics) -> None:
        self.tokenizer = tokenizer
        self._pool = pool
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._running: set[asyncio.Queue[tuple[Choice, TextOutput] | Exception]] = set()

    def fail_all(self, error: APIError) -> None:
        """Ends everything that runs with `error`; engines are told to abort."""
        for queue in self._running:
            queue.put_nowait(error)

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
        return self._job(request, "chatcmpl", [token_ids], [""], "messages", started)

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
        return self._job(request, "cmpl", token_ids, echoes, "prompt", started)

    async def run(self, job: Job) -> AsyncGenerator[tuple[Choice, TextOutput], None]:
        """Outputs of all choices as they come; of each, in order up to the finished one.

        Closing early aborts what still runs.

        Raises:
            APIError: one of the sequences failed; the others are aborted.
        """
        queue: asyncio.Queue[tuple[Choice, TextOutput] | Exception] = asyncio.Queue()
        tasks = [asyncio.create_task(self._run_choice(job, choice, queue)) for choice in job.choices]
        unfinished = len(tasks)
        self._running.add(queue)
        try:
            while unfinished:
                item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                unfinished -= item[1].finish_reason is not None
                yield item
        finally:
            self._running.discard(queue)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._metrics.e2e_latency.observe(time.monotonic() - job.started)

    async def _run_choice(
        self, job: Job, choice: Choice, queue: asyncio.Queue[tuple[Choice, TextOutput] | Exception]
    ) -> None:
        last = job.started
        first = True
        try:
            async with aclosing(self._dispatcher.generate(choice.sequence)) as outputs:
                async for output in outputs:
                    if output.new_token_ids:
                        now = time.monotonic()
                        if first:
                            self._metrics.time_to_first_token.observe(now - last)
                        else:
                            self._metrics.inter_token_latency.observe((now - last) / len(output.new_token_ids))
                        last, first = now, False
                        self._metrics.generation_tokens.inc(len(output.new_token_ids))
                    result = choice.processor.push(output)
                    queue.put_nowait((choice, result))
                    if result.finish_reason is not None:
                        return
        except APIError as error:
            queue.put_nowait(error)
        except Exception as error:  # a bug here must not leave the client waiting for ever
            logger.exception("request %s: choice %d failed", job.id, choice.index)
            queue.put_nowait(internal(f"The gateway failed: {error!r}"))

    def _job(
        self,
        request: GenerationRequest,
        prefix: str,
        prompts: list[list[int]],
        echoes: list[str],
        field: str,
        started: float,
    ) -> Job:
        job_id = f"{prefix}-{uuid.uuid4().hex}"
        arrival = time.time()
        seed = secrets.randbits(63) if request.seed is None else request.seed
        choices = []
        for prompt_index, token_ids in enumerate(prompts):
            params = request.sampling_params(seed=seed, max_tokens=self._max_tokens(request, len(token_ids), field))
            self._check_ids(list(params.logit_bias or {}), "logit_bias")
            self._check_ids(params.stop_token_ids, "stop_token_ids")
            self._metrics.prompt_tokens.inc(len(token_ids))
            for sample_index in range(request.num_samples):
                index = prompt_index * request.num_samples + sample_index
                sequence = Sequence(
                    request_id=job_id if len(prompts) * request.num_samples == 1 else f"{job_id}-c{index}",
                    prompt_token_ids=token_ids,
                    sampling_params=params,
                    sample_index=sample_index,
                    arrival_time=arrival,
                    priority=request.priority or 0,
                    cache_salt=request.cache_salt or "",
                )
                processor = OutputProcessor(
                    self.tokenizer,
                    stops=request.stops,
                    include_stop=bool(request.include_stop_str_in_output),
                    skip_special_tokens=request.skip_special_tokens is not False,
                    min_tokens=params.min_tokens,
                )
                choices.append(Choice(index, sequence, processor, echoes[prompt_index]))
        return Job(job_id, request.model, int(arrival), started, choices, len(prompts))

    def _encode(self, text: str, field: str, limit: int | None, *, add_special_tokens: bool) -> list[int]:
        fewest = self.tokenizer.fewest_tokens(text)
        if limit is not None and fewest >= limit:
            raise prompt_too_long(limit, fewest, field)
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def _max_tokens(self, request: GenerationRequest, prompt_len: int, field: str) -> int:
        """Tokens to generate at most, so that prompt and answer fit the model."""
        if prompt_len == 0:
            raise RequestError(f"{field} must not be empty", param=field)
        limit = self._pool.max_model_len
        if limit is None:
            raise unavailable("No decode engine is ready; retry later.", code="no_ready_engine")
        requested = request.requested_max_tokens()
        explicit = request.max_tokens is not None or getattr(request, "max_completion_tokens", None) is not None
        needed = requested if requested is not None and explicit else 1
        if prompt_len + needed > limit:
            raise context_length_exceeded(limit, prompt_len, needed, field)
        room = limit - prompt_len
        return room if requested is None else min(requested, room)

    def _check_ids(self, token_ids: list[int], field: str) -> None:
        vocab_size = self.tokenizer.vocab_size
        wrong = next((token_id for token_id in token_ids if not 0 <= token_id < vocab_size), None)
        if wrong is not None:
            raise RequestError(f"{field}: token ids must be in [0, {vocab_size - 1}], got {wrong}", param=field)


async def _offload(work: Callable[[], _Result], num_chars: int) -> _Result:
    """Runs `work` here when it is short, else in a thread."""
    if num_chars <= INLINE_CHARS:
        return work()
    return await asyncio.to_thread(work)
