"""Runs the prompts of one HTTP request on pooling models, and returns their vectors."""

from __future__ import annotations

import asyncio
import dataclasses
import time
import uuid
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

from baton_gateway.errors import EngineRefusalError, bad_request, check_task, internal, unavailable
from baton_gateway.metrics import GatewayMetrics
from baton_gateway.requests.cache_salts import CacheSalts
from baton_gateway.requests.generator import sequence_tasks
from baton_gateway.requests.job_builder import check_priority
from baton_gateway.requests.prompts import PromptBounds, PromptReader
from baton_gateway.routing.dispatcher import Dispatcher
from baton_gateway.routing.engine_pool import EnginePool
from baton_gateway.routing.sequence import Sequence
from baton_gateway.thread_pool import run_tokenization
from baton_protocol.options.config import AccessConfig
from baton_protocol.pooling_params import (
    NO_SAMPLING,
    PairFormat,
    PoolingParams,
    Task,
    dot,
    unpack_vector,
)
from baton_text.request_error import RequestError
from baton_text.requests.pooling_requests import (
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from baton_text.responses.pooling import PoolingUsage

#: Limit on the characters of all pairs of a request. A query counts once for each document, because
#: each pair is a prompt. A small body could otherwise become very many tokens.
MAX_PAIR_CHARACTERS = 2**24


@dataclass
class PoolingJob:
    """The prompts of one HTTP request, and their vectors.

    Args:
        id: id of the request in the response.
        created: Unix time of the request, in seconds.
        sequences: one for each prompt.
        vectors: the result of each sequence, as bytes of little-endian float32 values. Empty until
            the job has run.
    """

    id: str
    created: int
    sequences: list[Sequence]
    vectors: list[bytes] = dataclasses.field(default_factory=list)

    @property
    def usage(self) -> PoolingUsage:
        num_tokens = sum(len(each.prompt_token_ids) for each in self.sequences)
        num_cached = sum(each.num_cached_tokens for each in self.sequences)
        return PoolingUsage(
            prompt_tokens=num_tokens,
            total_tokens=num_tokens,
            prompt_tokens_details={"cached_tokens": num_cached},
        )


@dataclass
class PairJob(PoolingJob):
    """A job that scores pairs of texts.

    With a classifier, each prompt contains both texts of a pair. With an embedding model, each
    prompt is a single text.

    Args:
        embedded: for each pair, the indices of its two texts in `sequences`. None if each prompt
            contains a pair.
    """

    embedded: list[tuple[int, int]] | None = None

    def scores(self) -> list[float]:
        """Return the score of each pair. The job must have run."""
        if self.embedded is None:
            return [unpack_vector(vector)[0] for vector in self.vectors]
        return [dot(self.vectors[first], self.vectors[second]) for first, second in self.embedded]


_Job = TypeVar("_Job", bound=PoolingJob)
#: Token ids, and the parameters of the prompt.
_Prompt = tuple[list[int], PoolingParams]


class PoolingJobBuilder:
    """Builds the jobs of pooling requests: tokenizes the prompts and checks their lengths."""

    def __init__(
        self,
        reader: PromptReader,
        pool: EnginePool,
        metrics: GatewayMetrics,
        access: AccessConfig,
        salts: CacheSalts,
    ) -> None:
        self._reader = reader
        self._pool = pool
        self._metrics = metrics
        self._access = access
        self._salts = salts

    async def embedding_job(
        self, request: EmbeddingRequest, size: int, client: str | None
    ) -> PoolingJob:
        """Return the job of a request for embeddings, with one sequence for each prompt.

        Call this only after a decode engine has been available.

        Args:
            request: the body.
            size: bytes of the body. The job of a large body is built in a thread.
            client: name of the client; None if clients need no API key.

        Raises:
            APIError: the model has another task, or a prompt does not fit the model.
            RequestError: a prompt is invalid, or a limit of this server is exceeded.
        """
        check_task(self._pool.task, Task.EMBED)
        bounds, params = self._bounds(), request.pooling_params

        def prompts() -> list[_Prompt]:
            add_special_tokens = request.add_special_tokens is not False
            return [
                (self._token_ids(prompt, "input", bounds, add_special_tokens), params)
                for prompt in request.prompts
            ]

        return self._job(PoolingJob, request, await run_tokenization(prompts, size), client)

    async def pair_job(
        self, request: ScoreRequest | RerankRequest, size: int, client: str | None
    ) -> PairJob:
        """Return the job of a request for scores of pairs of texts.

        With a classifier, the job has one sequence for each pair. With an embedding model, it has
        one for each distinct text.

        Args:
            request: the body.
            size: bytes of the body. The job of a large body is built in a thread.
            client: name of the client; None if clients need no API key.

        Raises:
            APIError, RequestError: in the same cases as `embedding_job`.
        """
        check_task(self._pool.task, Task.EMBED, Task.CLASSIFY)
        bounds, pair_format = self._bounds(), self._pool.pair_format
        pairs, fields = request.pairs, request.PAIR_FIELDS
        num_characters = sum(len(first) + len(second) for first, second in pairs)
        if num_characters > MAX_PAIR_CHARACTERS:
            raise RequestError(
                f"all pairs together may have at most {MAX_PAIR_CHARACTERS} characters, got "
                f"{num_characters}; send fewer at once",
                param=fields[1],
                code="request_too_large",
            )
        unit = PoolingParams(normalize=True)
        indices: dict[str, int] = {}  # index of the prompt of each embedded text

        def prompts() -> list[_Prompt]:
            if pair_format is not None:
                return [self._pair(pair_format, pair, fields, bounds) for pair in pairs]
            for pair in pairs:
                for text in pair:
                    indices.setdefault(text, len(indices))
            names = {
                text: field for pair in pairs for text, field in zip(pair, fields, strict=True)
            }
            return [(self._token_ids(text, names[text], bounds, True), unit) for text in indices]

        token_ids = await run_tokenization(prompts, max(size, num_characters))
        job = self._job(PairJob, request, token_ids, client)
        if indices:
            job.embedded = [(indices[first], indices[second]) for first, second in pairs]
        return job

    def _bounds(self) -> PromptBounds:
        max_model_len = self._pool.max_model_len
        assert max_model_len is not None
        return PromptBounds(max_model_len, self._access.max_prompt_tokens, room=0)

    def _job(
        self,
        kind: type[_Job],
        request: PoolingRequest,
        prompts: list[_Prompt],
        client: str | None,
    ) -> _Job:
        check_priority(request.priority, self._access)
        job_id, now = f"pool-{uuid.uuid4().hex}", time.time()
        cache_salt = self._salts.salt(client, request.cache_salt or "")
        sequences = [
            Sequence(
                request_id=f"{job_id}-{index}",
                prompt_token_ids=token_ids,
                sampling_params=NO_SAMPLING,
                arrival_time=now,
                priority=request.priority or 0,
                cache_salt=cache_salt,
                pooling_params=params,
            )
            for index, (token_ids, params) in enumerate(prompts)
        ]
        self._metrics.prompt_tokens.inc(sum(len(each.prompt_token_ids) for each in sequences))
        return kind(job_id, int(now), sequences)

    def _pair(
        self,
        pair_format: PairFormat,
        pair: tuple[str, str],
        fields: tuple[str, str],
        bounds: PromptBounds,
    ) -> _Prompt:
        token_ids, second_text_start = self._reader.encode_pair(pair_format, pair, fields, bounds)
        bounds.check(len(token_ids), fields[1])
        return token_ids, PoolingParams(second_text_start=second_text_start)

    def _token_ids(
        self, prompt: str | list[int], field: str, bounds: PromptBounds, add_special_tokens: bool
    ) -> list[int]:
        token_ids = self._reader.token_ids(
            prompt, field, bounds, add_special_tokens=add_special_tokens
        )
        if not token_ids:
            raise RequestError(f"{field} must not be empty", param=field)
        bounds.check(len(token_ids), field)
        return token_ids


class PoolingRunner:
    """Runs the sequences of jobs on engines."""

    def __init__(self, dispatcher: Dispatcher, metrics: GatewayMetrics) -> None:
        self._dispatcher = dispatcher
        self._metrics = metrics
        #: The future vectors of each running job. A shutdown of the gateway sets a failure instead.
        self._running: set[asyncio.Future[list[bytes]]] = set()

    def fail_all(self) -> None:
        """End every running job with an error, because the gateway shuts down."""
        for vectors in self._running:
            if not vectors.done():
                vectors.set_exception(
                    unavailable("This gateway shut down before the request ended.", code="draining")
                )

    async def run(self, job: PoolingJob, started: float) -> None:
        """Run all sequences of `job`, and set its vectors. If cancelled, abort the sequences.

        Args:
            started: monotonic time at which the request arrived, in seconds.

        Raises:
            APIError: one sequence failed. The other sequences are aborted.
        """
        work = ((sequence, self._run(sequence)) for sequence in job.sequences)
        try:
            async with sequence_tasks(work) as tasks:
                vectors = asyncio.gather(*tasks)
                self._running.add(vectors)
                try:
                    job.vectors = await vectors
                finally:
                    self._running.discard(vectors)
        finally:
            self._metrics.e2e_latency.observe(time.monotonic() - started)

    async def _run(self, sequence: Sequence) -> bytes:
        try:
            async with aclosing(self._dispatcher.generate(sequence)) as outputs:
                async for output in outputs:
                    if output.pooler_output is not None:
                        return output.pooler_output
        except EngineRefusalError as error:
            names_field = error.message.startswith("dimensions")
            param = "dimensions" if names_field else None
            raise bad_request(RequestError(error.message, param=param)) from error
        raise internal("The engine ended the request without a vector.")
