"""Discovery of engines from a JSON file."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from pathlib import Path

import msgspec

from baton_gateway.routing.discovery import ROLES, Discovery
from baton_protocol.options.config import EngineEndpoint, EngineEndpoints

logger = logging.getLogger(__name__)

FILE_POLL_S = 0.25


class FileDiscovery(Discovery):
    """Reads endpoints from a JSON file (`EngineEndpoints`), at the start and after each change.

    While the file is missing or invalid, the last valid endpoints stay. So a half-written file
    does not disconnect every engine.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    async def watch(self) -> AsyncGenerator[list[EngineEndpoint], None]:
        last: bytes | None = None
        last_error = ""
        while True:
            try:
                content = await asyncio.to_thread(self._path.read_bytes)
                if content != last:
                    last = content
                    endpoints = parse_endpoints(content)
                    last_error = ""
                    yield endpoints
            except (OSError, ValueError) as error:
                if str(error) != last_error:  # log each failure once, not at every poll
                    last_error = str(error)
                    logger.warning(
                        "discovery file %s is not usable, so the last valid engines stay: %s",
                        self._path,
                        error,
                    )
            await asyncio.sleep(FILE_POLL_S)


def parse_endpoints(content: bytes) -> list[EngineEndpoint]:
    """Return the endpoints in the content of a discovery file.

    Raises:
        ValueError: the content is not an `EngineEndpoints`, or has an unknown role or a duplicate
            name.
    """
    try:
        endpoints = msgspec.json.decode(content, type=EngineEndpoints).engines
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(
            f'expected {{"engines": [{{"name", "role", "host"}}, ...]}}: {error}'
        ) from error
    for endpoint in endpoints:
        if endpoint.role not in ROLES:
            raise ValueError(
                f"engine {endpoint.name!r}: role must be prefill or decode, got {endpoint.role!r}"
            )
    if len({endpoint.name for endpoint in endpoints}) != len(endpoints):
        raise ValueError("engine names must be unique")
    return endpoints
