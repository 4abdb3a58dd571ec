"""Why a model cannot be fetched. The process that sees one ends with `FATAL <reason>: <message>`."""

from __future__ import annotations


class FetchError(Exception):
    """Another try without a change is pointless, but for one that is `temporary`."""

    def __init__(self, reason: str, message: str, *, temporary: bool = False) -> None:
        super().__init__(message)
        self.reason = reason
        """One CamelCase word, for conditions."""
        self.message = message
        self.temporary = temporary


def missing(message: str) -> FetchError:
    return FetchError("ModelMissing", message)


def access_denied(message: str) -> FetchError:
    return FetchError("ModelAccessDenied", message)


def no_space(message: str) -> FetchError:
    return FetchError("NoSpace", message)


def invalid(message: str) -> FetchError:
    """What the source holds cannot be served, or is not safe to take."""
    return FetchError("ModelInvalid", message)


def source_invalid(message: str) -> FetchError:
    """The settings that lead to the source cannot work."""
    return FetchError("ModelSourceInvalid", message)


class TransientError(Exception):
    """The network, or what came over it, failed: the same request may succeed later."""
