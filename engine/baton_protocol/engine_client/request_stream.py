"""Async iterator over the outputs of one request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from baton_protocol.engine_messages import EngineCoreOutput


class EngineDeadError(Exception):
    """The engine instance is dead, never answered, or made no progress. The text is the reason."""


class HandshakeFailedError(EngineDeadError):
    """The handshake with the engine failed, usually because the service keys differ.

    A single failure does not prove a wrong key, because the engine may have ended at that moment.
    """


class RequestStream:
    """Async iterator over the outputs of one request. The last output has `finished` set."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self._queue: asyncio.Queue[EngineCoreOutput | EngineDeadError] = asyncio.Queue()
        self._finished = False

    def __aiter__(self) -> AsyncIterator[EngineCoreOutput]:
        return self

    async def __anext__(self) -> EngineCoreOutput:
        """Return the next output.

        Raises:
            EngineDeadError: the engine died before the request finished.
        """
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
