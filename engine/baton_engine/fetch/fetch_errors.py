"""Errors of a fetch.

After a FetchError, the last line of stderr is `FATAL <reason>: <message>`.
"""

from __future__ import annotations

from baton_protocol.process.fatal import ConfigurationError


class FetchError(ConfigurationError):
    """The fetch failed. If the error is `temporary`, the same fetch may succeed later."""

    def __init__(self, reason: str, message: str, *, temporary: bool = False) -> None:
        super().__init__(reason, message)
        self.temporary = temporary


class TransientError(Exception):
    """A temporary failure, for example of the network. A retry may succeed."""
