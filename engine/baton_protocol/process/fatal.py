"""Reports a configuration that cannot work, by a FATAL line and exit code 78."""

from __future__ import annotations

import argparse
import os
import sys
from typing import NoReturn

#: Limit on the message in the FATAL line, in bytes. A kubelet keeps the last 2048 bytes of a log as
#: the termination message.
MAX_MESSAGE_BYTES = 1800


class ConfigurationError(Exception):
    """The configuration cannot work. A retry without a change fails again.

    Args:
        reason: CamelCase word, used as the reason of a Kubernetes condition.
        message: the problem and its remedy.
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

    The message may contain text of a checkpoint. Therefore control characters are escaped, and a
    long message is cut. Print nothing after this line, because the operator reads the last line
    from the pod's status.
    """
    text = "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode()
        for each in " ".join(str(message)[: 2 * MAX_MESSAGE_BYTES].split())
    ).encode()
    if len(text) > MAX_MESSAGE_BYTES:
        text = text[:MAX_MESSAGE_BYTES] + b"..."
    print(f"FATAL {reason}: {text.decode(errors='ignore')}", file=sys.stderr, flush=True)
    return os.EX_CONFIG
