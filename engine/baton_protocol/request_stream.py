"""Outputs of one request as they come from an engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from baton_protocol.messages import EngineCoreOutput


class EngineDeadError(Exception):
    """The engine instance is gone or never answered; the text says how that was noticed."""


class HandshakeFailedError(EngineDeadError):
    """Somebody listens, but did not take this client for one of its service. Once may be chance: it may have ended just then."""


class RequestStream:
    """Outputs of one request, in order: an async iterator that ends after the finished output."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self._queue: asyncio.Queue[EngineCoreOutput | EngineDeadError] = asyncio.Queue()
        self._finished = False

    def __aiter__(self) -> AsyncIterator[EngineCoreOutput]:
        return self

    async def __anext__(self) -> EngineCoreOutput:
        """Raises EngineDeadError when the engine goes away first."""
        if self._finished:
            raise StopAsyncIteration
        item = await self._queue.get()
        if isinstance(item, EngineDeadError):
            self._finished = True
            raise item
        self._finished = item.finished
        return item

    def put(self, item: EngineCoreOutput | EngineDeadError) -> None:
        self._queue.put_nowait(item)
