"""Builds the HTTP applications of one gateway, and the components between them and the engines."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from baton_gateway.access.api_keys import ApiKeys
from baton_gateway.access.graceful_shutdown import GracefulShutdown
from baton_gateway.endpoints.generation_endpoint import GenerationEndpoint
from baton_gateway.endpoints.openapi.document import OpenAPIEndpoint
from baton_gateway.endpoints.pooling_endpoints import PoolingEndpoints
from baton_gateway.endpoints.request_services import RequestServices
from baton_gateway.endpoints.status_endpoints import StatusEndpoints
from baton_gateway.endpoints.stored_responses import StoredResponses
from baton_gateway.endpoints.tokenize_endpoints import TokenizeEndpoints
from baton_gateway.endpoints.writers.chat_writer import ChatAPI
from baton_gateway.endpoints.writers.completion_writer import CompletionAPI
from baton_gateway.endpoints.writers.generation_api import GenerationAPI
from baton_gateway.endpoints.writers.messages_writer import MessagesAPI
from baton_gateway.endpoints.writers.responses_writer import ResponsesAPI
from baton_gateway.http.cors import CORS
from baton_gateway.http.middlewares import (
    Authentication,
    RequestCounter,
    convert_errors,
    set_headers,
)
from baton_gateway.http.request_id import log_request_id
from baton_gateway.requests.cache_salts import CacheSalts
from baton_gateway.requests.generator import Generator
from baton_gateway.requests.job_builder import JobBuilder
from baton_gateway.requests.pooling_jobs import PoolingJobBuilder, PoolingRunner
from baton_gateway.requests.prompts import PromptReader
from baton_gateway.requests.response_store import ResponseStore
from baton_gateway.routing.dispatcher import Dispatcher
from baton_gateway.routing.placer import Placer
from baton_protocol.service_key import ServiceKey
from baton_text.generation_defaults import GenerationDefaults
from baton_text.reply_parsing.reply_format import ReplyFormat
from baton_text.tokenizer import Tokenizer


def build_applications(
    services: RequestServices,
    service_key: ServiceKey | None,
    tokenizer: Tokenizer,
    defaults: GenerationDefaults,
    keys: ApiKeys | None,
    cors: CORS,
) -> tuple[web.Application, web.Application, GracefulShutdown]:
    """Return the HTTP applications of a gateway, and the object that shuts them down.

    Args:
        services: the objects that all endpoints share.
        service_key: the key of the LLMService; None if the gateway has no key.
        tokenizer: the tokenizer of the served checkpoint.
        defaults: the model's sampling parameters for fields that requests leave out.
        keys: authenticates clients; None if clients need no API key.
        cors: answers CORS preflights and sets CORS headers.

    Returns:
        The application for the clients' port, the application for the metrics port, and the
        graceful shutdown of both.
    """
    config, metrics, pool = services.config, services.metrics, services.pool

    # Running a request on the engines
    placer = Placer(
        pool,
        metrics,
        prefill_threshold_tokens=config.prefill_threshold_tokens,
        queue_wait_s=config.queue_wait_s,
        resume_wait_s=config.resume_wait_s,
    )
    dispatcher = Dispatcher(placer, metrics, inter_token_timeout_s=config.inter_token_timeout_s)
    generator = Generator(dispatcher, metrics)
    pooling_runner = PoolingRunner(dispatcher, metrics)
    shutdown = GracefulShutdown(
        services.admission, (generator, pooling_runner, services.queue), config.drain_quiet_s
    )

    # From the body of a request to what the engines run
    salts = CacheSalts(config.access, service_key)
    reader = PromptReader(tokenizer)
    template = tokenizer.chat_template
    reply_format = ReplyFormat.choose(
        config.tool_parser, config.reasoning_parser, None if template is None else template.source
    )
    builder = JobBuilder(
        tokenizer, reader, pool, metrics, config.access, salts, defaults, reply_format
    )
    pooling_builder = PoolingJobBuilder(reader, pool, metrics, config.access, salts)

    # Routes and middlewares of the two ports
    store, name = ResponseStore(), services.served_name
    apis: list[GenerationAPI[Any]] = [
        ChatAPI(name, tokenizer),
        CompletionAPI(name, tokenizer),
        ResponsesAPI(name, tokenizer, store),
        MessagesAPI(name, tokenizer),
    ]

    status = StatusEndpoints(services, shutdown)
    openapi = OpenAPIEndpoint(needs_key=keys is not None, client_timeout_s=config.client_timeout_s)
    routes = [
        *(GenerationEndpoint(api, services, builder, generator).route() for api in apis),
        *PoolingEndpoints(services, pooling_builder, pooling_runner).routes(),
        *StoredResponses(services, store).routes(),
        *TokenizeEndpoints(services, tokenizer).routes(),
        *status.routes(),
        openapi.route(),
    ]
    count = RequestCounter(metrics).middleware
    authenticate = Authentication(keys, shutdown).middleware
    app = web.Application(
        middlewares=[log_request_id, cors.middleware, count, convert_errors, authenticate]
    )
    app.on_response_prepare.extend([set_headers, cors.set_headers, shutdown.close_connection])
    app.add_routes(routes)
    metrics_app = web.Application(middlewares=[log_request_id, count, convert_errors])
    metrics_app.on_response_prepare.append(set_headers)
    metrics_app.add_routes(status.metrics_routes())
    return app, metrics_app, shutdown
