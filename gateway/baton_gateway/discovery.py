"""Discovery: which engine pods there are.

A discovery yields the whole set whenever it may have changed, never a difference: a lost event heals with the next set.
"""

from __future__ import annotations

import abc
import asyncio
import logging
from collections.abc import AsyncGenerator
from pathlib import Path

import msgspec

from baton_protocol.config import DiscoveryConfig, EngineEndpoint, EngineEndpoints, container_path

logger = logging.getLogger(__name__)

FILE_POLL_S = 0.25

ROLES = ("prefill", "decode")


class Discovery(abc.ABC):
    @abc.abstractmethod
    def watch(self) -> AsyncGenerator[list[EngineEndpoint], None]:
        """Yields the current endpoints, again after every change; never ends. Transient failures are logged and retried."""


class FileDiscovery(Discovery):
    """Endpoints of a JSON file (`EngineEndpoints`), read again when its content changes.

    A file that is missing or broken keeps the last good set: an editor's half-written file must not drop every engine.
    """

    def __init__(self, path: Path, *, poll_s: float = FILE_POLL_S) -> None:
        self._path = path
        self._poll_s = poll_s

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
                if str(error) != last_error:  # once per kind of failure, not four times a second
                    last_error = str(error)
                    logger.warning(
                        "discovery file %s cannot be used, keeping the last engines: %s",
                        self._path,
                        error,
                    )
            await asyncio.sleep(self._poll_s)


def parse_endpoints(content: bytes) -> list[EngineEndpoint]:
    """Raises ValueError: not an `EngineEndpoints`, an unknown role, or a name used twice."""
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


def make_discovery(config: DiscoveryConfig) -> Discovery:
    """Raises ValueError unless exactly one of file and service is set."""
    if bool(config.file) == bool(config.service):
        raise ValueError("discovery: set exactly one of file and service")
    if config.file:
        return FileDiscovery(container_path(config.file))
    from baton_gateway.kubernetes_discovery import (
        KubernetesDiscovery,
    )  # a slow import that the file way does not need

    return KubernetesDiscovery(
        config.namespace or "default", config.service, resync_s=config.resync_s
    )
