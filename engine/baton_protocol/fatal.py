"""The end of a process whose configuration cannot work: a FATAL line and exit code 78."""

from __future__ import annotations

import os
import sys


class ConfigurationError(Exception):
    """A configuration that cannot work. A retry without a change fails again.

    Args:
        reason: one CamelCase word, used as a condition's reason.
        message: what is wrong and what to do.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


def report_fatal(reason: str, message: object) -> int:
    """Print `FATAL <reason>: <message>` as one line. Return the exit code, 78.

    It has to be the last line on stderr: the operator reads it from the pod's status.
    """
    print(f"FATAL {reason}: {' '.join(str(message).split())}", file=sys.stderr, flush=True)
    return os.EX_CONFIG
