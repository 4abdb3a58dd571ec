"""Why a checkpoint cannot be served. The process that sees one ends with exit code 78 and `FATAL <reason>: <message>`."""

from __future__ import annotations


class ConfigurationError(Exception):
    """What was configured cannot work; retrying without a change is pointless."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        """One CamelCase word, for conditions."""
        self.message = message


class ModelNotFound(ConfigurationError):  # noqa: N818 - the name is the reason shown to users
    """The model's folder does not exist."""

    def __init__(self, message: str) -> None:
        super().__init__("ModelNotFound", message)


class ModelInvalid(ConfigurationError):  # noqa: N818 - the name is the reason shown to users
    """The folder exists, but what is in it cannot be loaded. The message names the file and, if there is one, the tensor."""

    def __init__(self, message: str) -> None:
        super().__init__("ModelInvalid", message)
