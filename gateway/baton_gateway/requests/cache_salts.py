"""Salts of the engines' prefix caches, which keep the cached blocks of clients apart.

Requests share cached blocks only if they have the same salt. A client whose requests hit the blocks
of another client could guess the prompts of that client: `cached_tokens` and the time to the first
token show a hit. The salt is a part of the sequence, so all engines that serve a request use it:
prefill and decode engines, and engines that take over after a failure.
"""

from __future__ import annotations

import hashlib
import hmac

from baton_protocol.engine_messages import CLIENT_CHARS
from baton_protocol.options.config import AccessConfig
from baton_protocol.service_key import ServiceKey


class CacheSalts:
    """Computes the prefix cache salt of a request from its client and its field `cache_salt`.

    Args:
        access: the configuration, which says which clients share cached blocks.
        service_key: key with which client names are hashed. All gateways with the same key compute
            the same salts. None: the hash uses an empty key.
    """

    def __init__(self, access: AccessConfig, service_key: ServiceKey | None) -> None:
        self._is_shared = access.cache_sharing == "service"
        self._shared_salts = frozenset(access.shared_cache_salts)
        self._secret = b"" if service_key is None else service_key.secret("cache-salt")

    def salt(self, client: str | None, requested: str) -> str:
        """Return the prefix cache salt of a request.

        Args:
            client: name of the client; None if clients need no API key.
            requested: the request's field `cache_salt`; an empty string if it is not set.
        """
        if client is None or self._is_shared or requested in self._shared_salts:
            return requested
        # A client's name is a file's name without a slash, so different pairs are different texts.
        return self._digest(client)[:CLIENT_CHARS] + self._digest(f"{client}/{requested}")

    def _digest(self, text: str) -> str:
        content = text.encode(errors="surrogateescape")
        return hmac.digest(self._secret, content, hashlib.sha256).hex()
