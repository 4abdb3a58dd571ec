"""The error of a request that cannot be served as it is."""

from __future__ import annotations


class RequestError(ValueError):
    """A request that is malformed, or has a value that is not allowed.

    Args:
        message: names the mistake and the correction.
        param: the field, like `messages[0].content`.
        code: OpenAI's machine-readable code, if there is one.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
