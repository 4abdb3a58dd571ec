"""What is wrong with a request."""

from __future__ import annotations


class RequestError(ValueError):
    """The request is wrong.

    Args:
        message: what is wrong, and what would be right.
        param: the field, like `messages[0].content`.
        code: OpenAI's machine-readable code, where there is one.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
