"""Builds jobs from OpenAI requests: tokenizes the prompts and checks lengths and options.

A job is one HTTP request, ready to run. It has one sequence for each prompt and sample. A beam
search is one sequence for each prompt, with one choice for each beam.
"""

from __future__ import annotations

import secrets
import time
import uuid
from typing import NamedTuple

import msgspec

from baton_gateway.errors import check_task, context_length_exceeded
from baton_gateway.metrics import GatewayMetrics
from baton_gateway.requests.cache_salts import CacheSalts
from baton_gateway.requests.job import Choice, Job, PromptJob, SampleRun
from baton_gateway.requests.prompts import PromptBounds, PromptReader
from baton_gateway.routing.engine_pool import EnginePool
from baton_gateway.routing.sequence import SampleGroup, Sequence
from baton_gateway.thread_pool import run_tokenization
from baton_protocol.options.config import AccessConfig
from baton_protocol.pooling_params import Task
from baton_protocol.sampling_params import SamplingParams, StructuredOutput
from baton_text.generation_defaults import GenerationDefaults
from baton_text.output import OutputProcessor
from baton_text.reply_parsing.reply_format import Reply, ReplyFormat
from baton_text.request_error import RequestError
from baton_text.requests.chat_request import ChatCompletionRequest
from baton_text.requests.completion_request import CompletionRequest
from baton_text.requests.generation_request import GenerationRequest
from baton_text.requests.structured_outputs import bad_words_token_ids
from baton_text.tokenizer import Tokenizer

#: Limit on the characters of all prompts that a response repeats, once for each choice.
MAX_ECHO_CHARACTERS = 2**20
#: Number of tokens at the end of a completion's prompt that may contain the start tag of the
#: reasoning.
PROMPT_END = 32


class _Prompts(NamedTuple):
    """The tokenized prompts of a request. Each list field has one entry per prompt."""

    id_prefix: str  #: Prefix of the response's id, such as `cmpl`.
    field: str  #: The field of the request that has the prompts, for errors.
    token_ids: list[list[int]]
    echoes: list[str]  #: Text of each prompt; empty without echo.
    #: Grammar of the reply to each prompt. None: the grammar of the request, if it has one.
    structures: list[StructuredOutput | None]
    reply: Reply | None = None  #: How a chat reply is parsed.


class JobBuilder:
    """Builds the jobs of all endpoints that generate text from chat and completion requests."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        reader: PromptReader,
        pool: EnginePool,
        metrics: GatewayMetrics,
        access: AccessConfig,
        salts: CacheSalts,
        defaults: GenerationDefaults,
        reply_format: ReplyFormat,
    ) -> None:
        self.tokenizer = tokenizer
        self._reader = reader
        self._pool = pool
        self._metrics = metrics
        self._access = access
        self._salts = salts
        self._defaults = defaults
        self._format = reply_format

    async def build(
        self,
        request: ChatCompletionRequest | CompletionRequest,
        started: float,
        size: int,
        client: str | None = None,
    ) -> Job:
        """Return the job of `request`. Call this only after a decode engine has been available.

        Args:
            request: the parsed body.
            started: monotonic time of the request's arrival, in seconds.
            size: size of the body in bytes. The job of a large body is built in a thread.
            client: name of the client; None if clients need no API key.

        Raises:
            RequestError: the messages cannot be rendered, an option is invalid, or a limit of this
                server is exceeded.
            APIError: the model has another task, a prompt does not fit the model, or rendering the
                messages takes too long.
        """
        check_task(self._pool.task, Task.GENERATE)
        self._check_rank(request.data_parallel_rank)
        check_priority(request.priority, self._access)
        max_model_len = self._pool.max_model_len
        assert max_model_len is not None
        bounds = PromptBounds(max_model_len, self._access.max_prompt_tokens)
        cache_salt = self._salts.salt(client, request.cache_salt or "")
        text = None
        if isinstance(request, ChatCompletionRequest):
            text = await self._reader.render(
                request.messages,
                request.template_variables,
                bounds,
                add_generation_prompt=request.add_generation_prompt is not False,
                size=size,
                tools=request.template_tools,
            )
            size = max(size, len(text))
        return await run_tokenization(
            lambda: self._job(request, text, started, bounds, cache_salt), size
        )

    def _job(
        self,
        request: ChatCompletionRequest | CompletionRequest,
        text: str | None,
        started: float,
        bounds: PromptBounds,
        cache_salt: str,
    ) -> Job:
        """Return the job of `request`. `text` is the rendered prompt of a chat request."""
        if isinstance(request, ChatCompletionRequest):
            assert text is not None
            read = self._chat_prompt(request, text, bounds)
        else:
            read = self._completion_prompts(request, bounds)
        job_id = f"{read.id_prefix}-{uuid.uuid4().hex}"
        arrival = time.time()
        self._defaults.fill(request)
        self._reader.check_ids(request.allowed_token_ids or [], "allowed_token_ids")
        request.check_prompt_logprobs(sum(map(len, read.token_ids)))
        lengths = [
            self._max_tokens(request, len(token_ids), read.field, bounds)
            for token_ids in read.token_ids
        ]
        request.check_beam_logprobs(sum(lengths))
        params_of = self._params(request, set(lengths))
        jobs = []
        for prompt_index, (token_ids, echo, structure) in enumerate(
            zip(read.token_ids, read.echoes, read.structures, strict=True)
        ):
            # The client's seed is the same for all prompts: equal prompts get equal answers.
            seed = secrets.randbits(63) if request.seed is None else request.seed
            params = msgspec.structs.replace(params_of[lengths[prompt_index]], seed=seed)
            params.structured_output = structure or params.structured_output
            self._metrics.prompt_tokens.inc(len(token_ids))
            first_index = prompt_index * request.num_candidates
            choices = [
                Choice(
                    first_index + index,
                    self._processor(request, params, read.reply),
                    token_ids,
                    echo,
                )
                for index in range(request.num_candidates)
            ]
            # The choices of each sequence: a beam search is one sequence, with a choice per beam.
            parts = [choices] if params.beam_width else [[choice] for choice in choices]
            group = SampleGroup(f"{job_id}-p{prompt_index}") if len(parts) > 1 else None
            runs = []
            for sample_index, part in enumerate(parts):
                is_only = len(read.token_ids) * len(parts) == 1
                request_id = job_id if is_only else f"{job_id}-c{first_index + sample_index}"
                if sample_index == 1:  # only the first sample returns the prompt's logprobs
                    params = msgspec.structs.replace(params, prompt_logprobs=None)
                sequence = Sequence(
                    request_id=request_id,
                    prompt_token_ids=token_ids,
                    sampling_params=params,
                    sample_index=sample_index,
                    arrival_time=arrival,
                    priority=request.priority or 0,
                    cache_salt=cache_salt,
                    group=group,
                    data_parallel_rank=request.data_parallel_rank,
                )
                runs.append(SampleRun(sequence, part))
            jobs.append(PromptJob(token_ids, runs))
        return Job(job_id, request, int(arrival), started, jobs)

    def _chat_prompt(
        self, request: ChatCompletionRequest, text: str, bounds: PromptBounds
    ) -> _Prompts:
        reply = self._format.reply(request, text, self.tokenizer.special_token_id)
        token_ids = self._reader.encode(text, "messages", bounds, add_special_tokens=False)
        structure = None if reply is None else reply.structured_output
        return _Prompts("chatcmpl", "messages", [token_ids], [""], [structure], reply)

    def _completion_prompts(self, request: CompletionRequest, bounds: PromptBounds) -> _Prompts:
        prompts = request.prompts()
        add_special = request.add_special_tokens is not False
        token_ids: list[list[int]] = []
        echoes: list[str] = []
        num_characters = 0
        for prompt in prompts:
            ids = self._reader.token_ids(prompt, "prompt", bounds, add_special_tokens=add_special)
            self._max_tokens(request, len(ids), "prompt", bounds)  # before the next is tokenized
            token_ids.append(ids)
            echo = ""
            if request.echo:
                echo = prompt if isinstance(prompt, str) else self.tokenizer.decode(prompt)
            echoes.append(echo)
            num_characters += len(echo) * request.num_candidates
            if num_characters > MAX_ECHO_CHARACTERS:
                raise RequestError(
                    f"the response would repeat {num_characters} characters of prompts or more, "
                    f"and at most {MAX_ECHO_CHARACTERS} are allowed; send fewer or shorter "
                    "prompts, or a smaller n",
                    param="echo",
                )
        structures = self._structures(request, token_ids)
        return _Prompts("cmpl", "prompt", token_ids, echoes, structures)

    def _structures(
        self, request: CompletionRequest, prompts: list[list[int]]
    ) -> list[StructuredOutput | None]:
        """Return for each prompt the grammar that enforces `thinking_budget` in the reply.

        All prompts that end inside the reasoning share one grammar, and all others share another.
        Without `thinking_budget`, the result has None for each prompt.
        """
        if request.thinking_budget is None:
            return [None] * len(prompts)
        decode, special = self.tokenizer.decode, self.tokenizer.special_token_id
        begun = [
            self._format.begins_reasoning(decode(prompt[-PROMPT_END:], skip_special_tokens=False))
            for prompt in prompts
        ]
        grammars = {
            is_reasoning: self._format.limit_reasoning(request, is_reasoning, special)
            for is_reasoning in set(begun)
        }
        return [grammars[is_reasoning] for is_reasoning in begun]

    def _params(self, request: GenerationRequest, lengths: set[int]) -> dict[int, SamplingParams]:
        """Return the sampling parameters for each max_tokens in `lengths`.

        Prompts with equal max_tokens share options such as logit_bias, which may be long.

        Raises:
            RequestError: an option is invalid.
        """
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

    def _processor(
        self, request: GenerationRequest, params: SamplingParams, reply: Reply | None
    ) -> OutputProcessor:
        return OutputProcessor(
            self.tokenizer,
            stops=request.stops,
            include_stop=bool(request.include_stop_str_in_output),
            skip_special_tokens=request.skip_special_tokens is not False,
            min_tokens=params.min_tokens,
            stop_token_ids=params.stop_token_ids,
            reply_parser=None if reply is None else reply.parser(),
            kept_token_ids=frozenset() if reply is None else reply.special_token_ids,
        )

    def _max_tokens(
        self, request: GenerationRequest, prompt_len: int, field: str, bounds: PromptBounds
    ) -> int:
        """Return the maximum number of tokens to generate after a prompt of `prompt_len` tokens.

        Raises:
            APIError: prompt and answer do not fit the model.
            RequestError: the prompt is empty, or a limit of this server is exceeded.
        """
        if prompt_len == 0:
            raise RequestError(f"{field} must not be empty", param=field)
        bounds.check_server_limit(prompt_len, field)
        requested = request.requested_max_tokens()
        if requested is None:
            requested = self._defaults.max_tokens
        limit_field = request.max_tokens_field()
        needed = requested if requested is not None and limit_field else 1
        if prompt_len + needed > bounds.max_model_len:
            is_prompt_short = prompt_len < bounds.max_model_len
            param = limit_field if limit_field and is_prompt_short else field
            raise context_length_exceeded(bounds.max_model_len, prompt_len, needed, param)
        room, limit = bounds.max_model_len - prompt_len, self._access.max_completion_tokens
        if limit is not None:
            if limit_field and needed > limit:
                raise RequestError(
                    f"this server generates at most {limit} tokens, got {needed}",
                    param=limit_field,
                )
            room = min(room, limit)
        return room if requested is None else min(requested, room)

    def _check_rank(self, rank: int | None) -> None:
        size = self._pool.data_parallel_size
        if rank is not None and not 0 <= rank < size:
            raise RequestError(
                f"data_parallel_rank must be in [0, {size - 1}], got {rank}: the decode group has "
                f"{size} ranks",
                param="data_parallel_rank",
            )


def check_priority(priority: int | None, access: AccessConfig) -> None:
    """Raise RequestError if `priority` is below `access.min_priority`. None is always allowed."""
    lowest = access.min_priority
    if priority is not None and priority < lowest:
        raise RequestError(
            f"this server accepts no priority below {lowest}, got {priority}: requests with "
            "lower values run first",
            param="priority",
        )
