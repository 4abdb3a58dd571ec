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
from baton_gateway.requests.pooling_jobs import (
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
#: Responses with more bytes of vectors are encoded one after the other, because encoding takes 17
#: times the bytes of the vectors in memory.
LARGE_VECTOR_BYTES = 2**20

_Body = TypeVar("_Body", bound=PoolingRequest)
_Job = TypeVar("_Job", bound=PoolingJob)


class PoolingEndpoints:
    """The endpoints of pooling models: embeddings, score and rerank."""

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
        return await self._serve(
            http, EmbeddingRequest, self._builder.embedding_job, self._embeddings
        )

    async def score(self, http: web.Request) -> web.StreamResponse:
        return await self._serve(http, ScoreRequest, self._builder.pair_job, self._scores)

    async def rerank(self, http: web.Request) -> web.StreamResponse:
        return await self._serve(http, RerankRequest, self._builder.pair_job, self._ranking)

    async def _serve(
        self,
        http: web.Request,
        kind: type[_Body],
        build: Callable[[_Body, int, str | None], Awaitable[_Job]],
        respond: Callable[[_Body, _Job], msgspec.Struct],
    ) -> web.StreamResponse:
        """Serve one request.

        Args:
            kind: type of the body.
            build: returns the job. The arguments are the body, its size in bytes and the client.
            respond: returns the response to a body, after the job has run.

        Raises:
            APIError, RequestError: the request failed.
        """
        services, client, started = self._services, http.get(CLIENT), time.monotonic()
        deadline = RequestDeadline(services.config.request_timeout_s)
        with services.admission.request(client) as reservation:
            async with services.bodies.charge(client) as charge:
                body, size = await services.read(http, charge, kind)
                # Before the prompts are tokenized, so that a refusal takes little time.
                reservation.resize(body.num_sequences)
                async with deadline.paused():
                    await services.queue.wait()
                async with deadline.enforced():
                    job = await build(body, size, client)
            async with deadline.enforced():
                await self._runner.run(job, started)
            encoded = await run_encoding(
                lambda: msgspec.json.encode(respond(body, job)),
                sum(map(len, job.vectors)),
                INLINE_VECTOR_BYTES,
                LARGE_VECTOR_BYTES,
            )
            return await services.send(http, encoded, deadline.left_s)

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

    def _scores(self, _: ScoreRequest, job: PairJob) -> ScoreResponse:
        return ScoreResponse(
            id=job.id,
            created=job.created,
            model=self._services.served_name,
            data=[Score(index=index, score=score) for index, score in enumerate(job.scores())],
            usage=job.usage,
        )

    def _ranking(self, body: RerankRequest, job: PairJob) -> RerankResponse:
        texts = body.texts
        results = [
            RankedDocument(
                index=index,
                relevance_score=score,
                document=UNSET if body.return_documents is False else RankedText(text=texts[index]),
            )
            for index, score in enumerate(job.scores())
        ]
        results.sort(key=lambda result: result.relevance_score, reverse=True)
        return RerankResponse(
            id=job.id,
            model=self._services.served_name,
            results=results[: body.top_n],
            usage=job.usage,
        )
