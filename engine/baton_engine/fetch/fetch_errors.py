"""Errors of a fetch. The process exits with `FATAL <reason>: <message>` as its last line."""

from __future__ import annotations

from baton_protocol.fatal import ConfigurationError


class FetchError(ConfigurationError):
    """The fetch failed. A retry without a change does not help unless the error is `temporary`."""

    def __init__(self, reason: str, message: str, *, temporary: bool = False) -> None:
        super().__init__(reason, message)
        self.temporary = temporary


class TransientError(Exception):
    """The network or the source failed. The same request may succeed later."""
