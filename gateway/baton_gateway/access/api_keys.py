"""Authentication by API keys from a folder, which is a mounted Secret.

The folder is read again while the gateway runs, so keys change without a restart. Only hashes of
the keys stay in memory. The key of a request is compared with all hashes, so that the response time
reveals nothing about the keys.
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

#: Paths for load balancers, which have no key. Every other path of the clients' port needs one.
OPEN_PATHS = frozenset({"/", "/health", "/ready"})
#: Shorter keys are invalid, because they can be guessed.
MIN_KEY_BYTES = 16
#: Longer keys are invalid. HTTP servers and proxies limit the size of a header.
MAX_KEY_BYTES = 4096
#: Name of the client whose key a request carries. A request that needs no key has no entry.
CLIENT = web.RequestKey("client", str)

_KEY = re.compile(rb"[\x21-\x7e]+")


class ApiKeys:
    """The API keys of a folder, which has one file per client.

    Args:
        folder: each file's name is the client's name. Each file's content is the client's key: one
            line of printable ASCII without spaces, of at least MIN_KEY_BYTES. Files with other
            content are ignored with a warning.

    Raises:
        OSError: the folder cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._entries: dict[str, bytes] | None = None
        self._failure = ""
        self._clients: list[tuple[bytes, str]] = []  # (SHA-256 of the key, name of the client)
        self._refresh()

    def refresh(self) -> None:
        """Read the folder again. If the folder cannot be read, the previous keys stay valid."""
        try:
            self._refresh()
            self._failure = ""
        except OSError as error:
            if str(error) != self._failure:  # log each failure once, not at every poll
                logger.error(
                    "API keys in %s cannot be read, so the keys read before stay valid: %s",
                    self._folder,
                    error,
                )
            self._failure = str(error)

    def client_of(self, authorization: list[str], api_key: list[str]) -> str:
        """Return the name of the client whose key a request carries.

        Args:
            authorization: all values of the header Authorization.
            api_key: all values of the header X-Api-Key, in which clients of Anthropic's API send
                the key. This header is ignored if the request has Authorization.

        Raises:
            APIError: 401, because neither header is present, or because the header has several
                values or no valid key.
        """
        scheme, key = "Bearer", ""
        if values := authorization:
            scheme, _, key = values[0].strip().partition(" ")
        elif values := api_key:
            key = values[0]
        else:
            raise _refused("This server needs an API key: send it as 'Authorization: Bearer KEY'.")
        if len(values) > 1 or scheme.lower() != "bearer" or not key.strip():
            raise _refused("Send exactly one Authorization header of the form 'Bearer KEY'.")
        offered = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        found = None
        for known, client in self._clients:
            if hmac.compare_digest(known, offered):
                found = client
        if found is None:
            raise _refused("This API key is not valid for this server.")
        return found

    def _refresh(self) -> None:
        entries = _read(self._folder)
        if entries == self._entries:
            return
        clients: dict[bytes, str] = {}
        for client, digest in entries.items():
            if not digest:
                logger.warning(
                    "API key of client %s is ignored: a key must be one line of printable ASCII "
                    "without spaces, of %d to %d bytes; make one with `openssl rand -hex 32`",
                    client,
                    MIN_KEY_BYTES,
                    MAX_KEY_BYTES,
                )
            elif digest in clients:
                logger.warning(
                    "API key of client %s is ignored: client %s has the same key",
                    client,
                    clients[digest],
                )
            else:
                clients[digest] = client
        self._entries, self._clients = entries, list(clients.items())
        if clients:
            logger.info(
                "the gateway loaded API keys of %d clients: %s",
                len(clients),
                ", ".join(clients.values()),
            )
        else:
            logger.warning(
                "there is no valid API key in %s: every request is refused until a key is added",
                self._folder,
            )


def client_name(http: web.Request) -> str:
    """Return the text ` of client NAME` for a log line; empty if clients need no API key."""
    client = http.get(CLIENT)
    return f" of client {client}" if client is not None else ""


def _read(folder: Path) -> dict[str, bytes]:
    """Return the SHA-256 of each file's key, by file name. The hash of an invalid key is empty.

    Raises:
        OSError: the folder or a file cannot be read.
    """
    entries: dict[str, bytes] = {}
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".."):  # the kubelet's folders for versions of a Secret
            continue
        try:
            with path.open("rb") as file:
                content = file.read(MAX_KEY_BYTES + 1)
        except (FileNotFoundError, IsADirectoryError):  # removed by a newer version of the Secret
            continue
        key = content.strip()
        is_valid = (
            len(key) >= MIN_KEY_BYTES and len(content) <= MAX_KEY_BYTES and _KEY.fullmatch(key)
        )
        entries[path.name] = hashlib.sha256(key).digest() if is_valid else b""
    return entries


def _refused(message: str) -> APIError:
    return APIError(401, message, code="invalid_api_key")
