"""The endpoints `/tokenize` and `/detokenize` of vLLM, and Anthropic's `count_tokens`.

The limits of admission count a request as one sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec
from aiohttp import web

from baton_gateway.access.api_keys import CLIENT
from baton_gateway.endpoints.request_services import RequestServices
from baton_gateway.errors import MESSAGES_PATH
from baton_gateway.http.body_budget import BodyCharge
from baton_gateway.http.request_body import INLINE_BODY_BYTES
from baton_gateway.requests.prompts import PromptBounds, PromptReader, TextBounds
from baton_gateway.thread_pool import run_off_loop, run_tokenization
from baton_text.requests.messages_request import CountTokensRequest
from baton_text.requests.tokenize_requests import DetokenizeRequest, TokenizeRequest
from baton_text.responses.anthropic import InputTokens
from baton_text.responses.openai import DetokenizeResponse, TokenizeResponse
from baton_text.tokenizer import Tokenizer

#: Assumed max_model_len in tokens, until a decode engine has sent the actual one.
UNKNOWN_MODEL_LEN = 2**15

_Request = TypeVar("_Request", TokenizeRequest, DetokenizeRequest, CountTokensRequest)


class TokenizeEndpoints:
    """The endpoints that convert text to tokens or tokens to text, and that count tokens."""

    def __init__(self, services: RequestServices, tokenizer: Tokenizer) -> None:
        self._services = services
        self._tokenizer = tokenizer
        self._reader = PromptReader(tokenizer)

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post(f"{MESSAGES_PATH}/count_tokens", self.count_tokens),
            web.post("/tokenize", self.tokenize),
            web.post("/detokenize", self.detokenize),
        ]

    async def tokenize(self, http: web.Request) -> web.StreamResponse:
        return await self._serve(http, TokenizeRequest, self._tokenize)

    async def detokenize(self, http: web.Request) -> web.StreamResponse:
        return await self._serve(http, DetokenizeRequest, self._detokenize)

    async def count_tokens(self, http: web.Request) -> web.StreamResponse:
        return await self._serve(http, CountTokensRequest, self._count_tokens)

    async def _serve(
        self,
        http: web.Request,
        kind: type[_Request],
        answer: Callable[[_Request, str, TextBounds, int | None], msgspec.Struct],
    ) -> web.StreamResponse:
        services, client = self._services, http.get(CLIENT)
        with services.admission.reserve(client):
            async with services.bodies.charge(client) as charge:
                encoded = await self._encoded_answer(http, kind, answer, charge)
            return await services.send(http, encoded)

    async def _encoded_answer(
        self,
        http: web.Request,
        kind: type[_Request],
        answer: Callable[[_Request, str, TextBounds, int | None], msgspec.Struct],
        charge: BodyCharge,
    ) -> bytes:
        request, size = await self._services.read(http, charge, kind)
        max_model_len = self._services.pool.max_model_len
        max_prompt_tokens = self._services.config.access.max_prompt_tokens
        bounds = TextBounds(PromptBounds(max_model_len or UNKNOWN_MODEL_LEN, max_prompt_tokens))
        text = await self._text(request, bounds, size)
        return await run_tokenization(
            lambda: msgspec.json.encode(answer(request, text, bounds, max_model_len)),
            max(size, len(text)),
        )

    async def _text(
        self,
        request: TokenizeRequest | DetokenizeRequest | CountTokensRequest,
        bounds: TextBounds,
        size: int,
    ) -> str:
        """Return the text to tokenize; empty for a DetokenizeRequest, which has tokens instead."""
        if isinstance(request, DetokenizeRequest):
            return ""
        if isinstance(request, CountTokensRequest):
            chat = await run_off_loop(request.chat_request, size, INLINE_BODY_BYTES)
            return await self._reader.render(
                chat.messages,
                chat.template_variables,
                bounds,
                add_generation_prompt=True,
                size=size,
                tools=chat.template_tools,
            )
        if request.prompt is not None:
            return request.prompt
        assert request.messages is not None  # see TokenizeRequest.validate
        return await self._reader.render(
            request.messages,
            request.chat_template_kwargs,
            bounds,
            add_generation_prompt=request.add_generation_prompt is not False,
            size=size,
        )

    def _tokenize(
        self, request: TokenizeRequest, text: str, bounds: TextBounds, max_model_len: int | None
    ) -> TokenizeResponse:
        """Return the response with the token ids of the request's prompt or messages.

        Raises:
            RequestError: the prompt or the messages are too long.
        """
        if request.prompt is not None:
            field, add_special = "prompt", request.add_special_tokens is not False
        else:  # the chat template writes special tokens itself
            field, add_special = "messages", bool(request.add_special_tokens)
        token_ids = self._reader.encode(text, field, bounds, add_special_tokens=add_special)
        bounds.check(len(token_ids), field)
        response = TokenizeResponse(
            count=len(token_ids), tokens=token_ids, max_model_len=max_model_len
        )
        if request.return_token_strs:
            response.token_strs = list(map(self._tokenizer.token_text, token_ids))
        return response

    def _count_tokens(
        self, request: CountTokensRequest, text: str, bounds: TextBounds, _: int | None
    ) -> InputTokens:
        token_ids = self._reader.encode(text, "messages", bounds, add_special_tokens=False)
        bounds.check(len(token_ids), "messages")
        return InputTokens(input_tokens=len(token_ids))

    def _detokenize(
        self, request: DetokenizeRequest, _: str, bounds: TextBounds, _max_model_len: int | None
    ) -> DetokenizeResponse:
        bounds.check(len(request.tokens), "tokens")
        self._reader.check_ids(request.tokens, "tokens")
        return DetokenizeResponse(
            prompt=self._tokenizer.decode(request.tokens, skip_special_tokens=False)
        )
