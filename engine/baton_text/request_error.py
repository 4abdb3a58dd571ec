"""The error of an invalid request."""

from __future__ import annotations

import reprlib

_SHORT = reprlib.Repr()
_SHORT.maxstring = 60


class RequestError(ValueError):
    """The request is invalid.

    Args:
        message: text that names the invalid value and the valid values.
        param: name of the invalid field, such as `messages[0].content`; None if no single field is
            invalid.
        code: OpenAI's machine-readable error code; None if OpenAI has none for this error.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


def quote(value: object) -> str:
    """Return the text of a client's value for an error message, shortened if it is long."""
    return _SHORT.repr(value)
