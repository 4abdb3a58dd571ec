"""Writes the configuration, the statistics and the input of a failed step to a JSON file."""

from __future__ import annotations

import dataclasses
import enum
import logging
import os
import socket
import tempfile
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from baton_engine.executor.step import SchedulerOutput
from baton_engine.metrics.engine_stats import EngineStats
from baton_protocol.options.config import EngineConfig, container_path

logger = logging.getLogger(__name__)

#: Fields of a step that contain prompts, answers or parameters of clients. Only their sizes are
#: written, because many people may read a dump.
_CLIENT_CONTENT = frozenset(
    {
        "prompt_token_ids",
        "generated_token_ids",
        "new_token_ids",
        "stop_token_ids",
        "logit_bias",
        "allowed_token_ids",
        "bad_words_token_ids",
        "spec",  # of a StructuredOutput: a JSON schema, a regular expression or a grammar
    }
)
#: Entries shown at each end of a long list.
_ENDS_SHOWN = 8


def write_crash_dump(
    config: EngineConfig,
    step: SchedulerOutput | None,
    stats: EngineStats | None,
    error: BaseException,
) -> Path | None:
    """Write a failed step's input, the configuration, the statistics and the error to a JSON file.

    The folder is `config.observability.crash_dump_dir`, or the system's temporary folder if unset.
    Prompts, answers, schemas and grammars are replaced by their sizes, and long lists of block ids
    are abbreviated. Only the file's owner can read the file. This function never raises, because
    another exception is being handled.

    Args:
        config: configuration of the engine.
        step: the step that failed. None: scheduling failed.
        stats: statistics at the failure, if available.
        error: the exception that ended the step.

    Returns:
        Path of the file, or None if the file could not be written. The reason is then logged.
    """
    try:
        content = {
            "error": "".join(traceback.format_exception(error)).splitlines(),
            "step": describe(step),
            "stats": describe(stats),
            "config": describe(config),
        }
        configured = config.observability.crash_dump_dir
        folder = container_path(configured) if configured else Path(tempfile.gettempdir())
        folder.mkdir(parents=True, exist_ok=True)
        name = f"step{step.step_id}" if step is not None else "schedule"
        stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
        path = folder / f"baton-crash-{socket.gethostname()}-{stamp}-{os.getpid()}-{name}.json"
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n")
    except Exception:
        logger.exception(
            "the crash dump of a failed step cannot be written; observability.crash_dump_dir is %s",
            config.observability.crash_dump_dir or f"unset ({tempfile.gettempdir()} is used)",
        )
        return None
    return path


def describe(value: Any) -> Any:
    """Return the value converted to JSON types, with long lists of numbers abbreviated."""
    if isinstance(value, enum.Enum):
        return value.name
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, msgspec.Struct):
        return _describe_fields(value, value.__struct_fields__)
    if dataclasses.is_dataclass(value):
        return _describe_fields(value, [field.name for field in dataclasses.fields(value)])
    if isinstance(value, Mapping):
        return {str(key): describe(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {name: describe(item) for name, item in zip(value._fields, value, strict=True)}
    if isinstance(value, set | frozenset):
        return [describe(item) for item in sorted(value)]
    if isinstance(value, Sequence):
        return _describe_list(value)
    return repr(value)


def _describe_fields(value: Any, names: Iterable[str]) -> dict[str, Any]:
    fields = {name: getattr(value, name) for name in names}
    return {
        name: f"{len(field)} left out" if name in _CLIENT_CONTENT and field else describe(field)
        for name, field in fields.items()
    }


def _describe_list(items: Sequence[Any]) -> Any:
    # Lists of numbers are long and rarely useful. Lists of requests are shown in full.
    if len(items) > 2 * _ENDS_SHOWN and isinstance(items[0], int | float):
        first, last = (
            ", ".join(map(str, part)) for part in (items[:_ENDS_SHOWN], items[-_ENDS_SHOWN:])
        )
        return f"[{first}, ... {len(items)} in all ..., {last}]"
    return [describe(item) for item in items]
