"""Reports a configuration that cannot work, by a FATAL line and exit code 78."""

from __future__ import annotations

import argparse
import os
import sys
from typing import NoReturn


class ConfigurationError(Exception):
    """The configuration cannot work. A retry without a change fails again.

    Args:
        reason: CamelCase word, used as the reason of a Kubernetes condition.
        message: what is wrong and what to do.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


class FlagParser(argparse.ArgumentParser):
    """An argument parser that raises ConfigurationError for wrong flags, and prints no usage."""

    def error(self, message: str) -> NoReturn:
        raise ConfigurationError("InvalidConfig", message)


def report_fatal(reason: str, message: object) -> int:
    """Print `FATAL <reason>: <message>` as one line on stderr, and return the exit code 78.

    Print nothing after this line, because the operator reads the last line from the pod's status.
    """
    print(f"FATAL {reason}: {' '.join(str(message).split())}", file=sys.stderr, flush=True)
    return os.EX_CONFIG
