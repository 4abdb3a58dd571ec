"""Who may ask: API keys from a folder (a mounted Secret), read again while the gateway runs.

A folder instead of a list in the configuration, because keys are secrets and change without a restart. Only their hashes stay in
memory, and a key that is offered is compared with all of them, in a time that does not tell which one it resembles.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
from pathlib import Path

from aiohttp import web

from baton_gateway.errors import APIError

logger = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/health", "/ready", "/metrics"})
"""For the kubelet and Prometheus, who have no key. Everything else needs one, so a path that is added is closed."""
MAX_KEY_BYTES = 4096
"""Longer ones would not pass as a header."""
CLIENT = web.RequestKey("client", str)
"""Name of the client whose key a request carries. Absent where no key is needed."""

_KEY = re.compile(rb"[\x21-\x7e]+")


class ApiKeys:
    """The keys of one folder.

    Args:
        folder: one file per client: its name is the client's, its content the key, space around it left out. What can be no key
            (nothing, several lines, other than printable ASCII) is none, and the log says so.

    Raises:
        OSError: the folder cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._entries: dict[str, bytes] = {}
        self._failure = ""
        self._clients: list[tuple[bytes, str]] = []
        """(SHA-256 of the key, name of the client)."""
        self._refresh(first=True)

    def refresh(self) -> None:
        """Takes up what has changed. A folder that cannot be read changes nothing."""
        try:
            self._refresh()
            self._failure = ""
        except OSError as error:
            if str(error) != self._failure:  # once, not at every look
                logger.error(
                    "API keys in %s cannot be read, those known stay: %s", self._folder, error
                )
            self._failure = str(error)

    def client_of(self, authorization: list[str]) -> str:
        """The client that these values of the header Authorization prove.

        Raises:
            APIError: 401.
        """
        if not authorization:
            raise _refused("This server needs an API key: send it as 'Authorization: Bearer KEY'.")
        scheme, _, key = authorization[0].strip().partition(" ")
        if len(authorization) > 1 or scheme.lower() != "bearer" or not key.strip():
            raise _refused("The Authorization header must be there once and read 'Bearer KEY'.")
        offered = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        found = None
        for known, client in self._clients:
            if hmac.compare_digest(known, offered):
                found = client
        if found is None:
            raise _refused("The API key is not known to this server.")
        return found

    def _refresh(self, *, first: bool = False) -> None:
        entries = _read(self._folder)
        if entries == self._entries and not first:
            return
        clients: dict[bytes, str] = {}
        for client, digest in entries.items():
            if not digest:
                logger.warning(
                    "API key %s is ignored: a key is one line of printable ASCII without spaces",
                    client,
                )
            elif digest in clients:
                logger.warning(
                    "API key %s is ignored: it is the same as %s", client, clients[digest]
                )
            else:
                clients[digest] = client
        self._entries, self._clients = entries, list(clients.items())
        if clients:
            logger.info("API keys of %d clients: %s", len(clients), ", ".join(clients.values()))
        else:
            logger.warning("there is no API key in %s: every request is refused", self._folder)


def client_name(http: web.Request) -> str:
    """For logs: ` of client NAME`, or nothing where no key is needed."""
    client = http.get(CLIENT)
    return f" of client {client}" if client is not None else ""


def _read(folder: Path) -> dict[str, bytes]:
    """Name -> hash of the key, empty if it can be none. Raises OSError."""
    entries: dict[str, bytes] = {}
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".."):  # how the kubelet keeps the versions of a Secret
            continue
        try:
            with path.open("rb") as file:
                content = file.read(MAX_KEY_BYTES + 1)
        except (
            FileNotFoundError,
            IsADirectoryError,
        ):  # a link to what a newer version of the Secret does not have
            continue
        key = content.strip()
        usable = len(content) <= MAX_KEY_BYTES and _KEY.fullmatch(key)
        entries[path.name] = hashlib.sha256(key).digest() if usable else b""
    return entries


def _refused(message: str) -> APIError:
    return APIError(401, message, code="invalid_api_key")
