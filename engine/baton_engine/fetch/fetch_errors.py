"""Errors of a fetch. The process exits with `FATAL <reason>: <message>` as its last line."""

from __future__ import annotations


class FetchError(Exception):
    """The fetch failed. A retry without a change does not help unless the error is `temporary`."""

    def __init__(self, reason: str, message: str, *, temporary: bool = False) -> None:
        super().__init__(message)
        #: Reason of a condition: one CamelCase word.
        self.reason = reason
        self.message = message
        self.temporary = temporary


def missing(message: str) -> FetchError:
    return FetchError("ModelMissing", message)


def access_denied(message: str) -> FetchError:
    return FetchError("ModelAccessDenied", message)


def no_space(message: str) -> FetchError:
    return FetchError("NoSpace", message)


def invalid(message: str) -> FetchError:
    """Return the error for files that cannot be served or are not safe to download."""
    return FetchError("ModelInvalid", message)


def source_invalid(message: str) -> FetchError:
    """Return the error for settings of the source that cannot work."""
    return FetchError("ModelSourceInvalid", message)


class TransientError(Exception):
    """The network or the source failed. The same request may succeed later."""
