"""Errors of a configuration or checkpoint that cannot be served.

The process that raises one exits with code 78 and logs `FATAL <reason>: <message>`.
"""

from __future__ import annotations

from baton_protocol.fatal import ConfigurationError

__all__ = ["ConfigurationError", "ModelInvalid", "ModelNotFound"]


class ModelNotFound(ConfigurationError):  # noqa: N818 - the name is the reason shown to users
    """The model's folder does not exist."""

    def __init__(self, message: str) -> None:
        super().__init__("ModelNotFound", message)


class ModelInvalid(ConfigurationError):  # noqa: N818 - the name is the reason shown to users
    """The folder's content cannot be loaded. The message names the file and the tensor, if any."""

    def __init__(self, message: str) -> None:
        super().__init__("ModelInvalid", message)
