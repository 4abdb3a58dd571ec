"""The endpoints of pooling models: `/v1/embeddings`, `/v1/score` and `/v1/rerank`."""

from __future__ import annotations

import base64
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec
from aiohttp import web
from msgspec import UNSET

from baton_gateway.access.api_keys import CLIENT
from baton_gateway.endpoints.request_deadline import RequestDeadline
from baton_gateway.endpoints.request_services import RequestServices
from baton_gateway.http.slow_clients import send_json
from baton_gateway.requests.pooling import (
    PairJob,
    PoolingJob,
    PoolingJobBuilder,
    PoolingRunner,
)
from baton_gateway.thread_pool import run_encoding
from baton_protocol.pooling_params import unpack_vector
from baton_text.requests.pooling_requests import (
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from baton_text.responses.pooling import (
    Embedding,
    EmbeddingResponse,
    RankedDocument,
    RankedText,
    RerankResponse,
    Score,
    ScoreResponse,
)

#: Limit on the bytes of vectors that are encoded on the event loop. More are encoded in a thread.
INLINE_VECTOR_BYTES = 2**14
#: Responses with more bytes of vectors are encoded one after the other. Encoding took 17 times the
#: bytes of the vectors.
LARGE_VECTOR_BYTES = 2**20

_Body = TypeVar("_Body", bound=PoolingRequest)
#: A job, and the function that computes the response after the job has run.
Work = tuple[PoolingJob, Callable[[], msgspec.Struct]]


class PoolingEndpoints:
    """The endpoints that pool prompts."""

    def __init__(
        self, services: RequestServices, builder: PoolingJobBuilder, runner: PoolingRunner
    ) -> None:
        self._services = services
        self._builder = builder
        self._runner = runner

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/v1/embeddings", self.embed),
            web.post("/v1/score", self.score),
            web.post("/v1/rerank", self.rerank),
        ]

    async def embed(self, http: web.Request) -> web.StreamResponse:
        async def build(body: EmbeddingRequest, size: int, client: str | None) -> Work:
            job = await self._builder.embedding_job(body, size, client)
            return job, lambda: self._embeddings(body, job)

        return await self._serve(http, EmbeddingRequest, build)

    async def score(self, http: web.Request) -> web.StreamResponse:
        async def build(body: ScoreRequest, size: int, client: str | None) -> Work:
            pairs = await self._builder.pair_job(body, ("text_1", "text_2"), size, client)
            return pairs.job, lambda: self._scores(pairs)

        return await self._serve(http, ScoreRequest, build)

    async def rerank(self, http: web.Request) -> web.StreamResponse:
        async def build(body: RerankRequest, size: int, client: str | None) -> Work:
            pairs = await self._builder.pair_job(body, ("query", "documents"), size, client)
            return pairs.job, lambda: self._ranking(body, pairs)

        return await self._serve(http, RerankRequest, build)

    async def _serve(
        self,
        http: web.Request,
        kind: type[_Body],
        build: Callable[[_Body, int, str | None], Awaitable[Work]],
    ) -> web.StreamResponse:
        """Serve one request.

        Args:
            kind: type of the body.
            build: called with the body, its size in bytes and the client. Returns the job, and
                `respond`, which computes the response after the job has run.

        Raises:
            APIError, RequestError: the request failed.
        """
        services, client, started = self._services, http.get(CLIENT), time.monotonic()
        deadline = RequestDeadline(services.config.request_timeout_s)
        with services.admission.request(client) as reservation:
            async with services.bodies.charge(client) as charge:
                body, size = await services.reader.read(http, charge, kind)
                # Before the prompts are tokenized, so that a refusal takes little time.
                reservation.resize(body.num_sequences)
                async with deadline.paused():
                    await services.queue.wait()
                async with deadline.enforced():
                    job, respond = await build(body, size, client)
            async with deadline.enforced():
                await self._runner.run(job, started)
            encoded = await run_encoding(
                lambda: msgspec.json.encode(respond()),
                sum(map(len, job.vectors)),
                INLINE_VECTOR_BYTES,
                LARGE_VECTOR_BYTES,
            )
            timeout_s = min(deadline.left_s, services.config.client_timeout_s)
            async with services.bodies.charge(client) as charge:
                return await send_json(http, encoded, timeout_s, charge)

    def _embeddings(self, body: EmbeddingRequest, job: PoolingJob) -> EmbeddingResponse:
        def encode(vector: bytes) -> list[float] | str:
            if body.encoding_format == "base64":
                return base64.b64encode(vector).decode()
            return list(unpack_vector(vector))

        return EmbeddingResponse(
            id=job.id,
            created=job.created,
            model=self._services.served_name,
            data=[
                Embedding(index=index, embedding=encode(vector))
                for index, vector in enumerate(job.vectors)
            ],
            usage=job.usage,
        )

    def _scores(self, pairs: PairJob) -> ScoreResponse:
        return ScoreResponse(
            id=pairs.job.id,
            created=pairs.job.created,
            model=self._services.served_name,
            data=[Score(index=index, score=score) for index, score in enumerate(pairs.scores())],
            usage=pairs.job.usage,
        )

    def _ranking(self, body: RerankRequest, pairs: PairJob) -> RerankResponse:
        texts = body.texts
        results = [
            RankedDocument(
                index=index,
                relevance_score=score,
                document=UNSET if body.return_documents is False else RankedText(text=texts[index]),
            )
            for index, score in enumerate(pairs.scores())
        ]
        results.sort(key=lambda result: result.relevance_score, reverse=True)
        return RerankResponse(
            id=pairs.job.id,
            model=self._services.served_name,
            results=results[: body.top_n],
            usage=pairs.job.usage,
        )
