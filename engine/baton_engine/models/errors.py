"""Errors for a configuration or checkpoint that cannot be served.

A process that raises such an error logs `FATAL <reason>: <message>` and exits with code 78.
"""

from __future__ import annotations

from baton_protocol.process.fatal import ConfigurationError

__all__ = ["ConfigurationError", "ModelInvalid", "ModelNotFound"]


class ModelNotFound(ConfigurationError):  # noqa: N818 - the name is the reason shown to users
    """The model's path is not an existing folder."""

    def __init__(self, message: str) -> None:
        super().__init__("ModelNotFound", message)


class ModelInvalid(ConfigurationError):  # noqa: N818 - the name is the reason shown to users
    """The checkpoint is incomplete, malformed or not supported."""

    def __init__(self, message: str) -> None:
        super().__init__("ModelInvalid", message)
