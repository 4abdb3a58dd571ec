"""The flags of `baton-engine`, one per field of EngineConfig, and the bounds of those fields."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

from baton_engine.models.errors import ConfigurationError
from baton_protocol.config import EngineConfig
from baton_protocol.options import options


def sizes(text: str) -> list[int]:
    """Parse numbers that are separated by commas."""
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must be numbers separated by commas, such as 1,2,4,8, got {text!r}"
        ) from None


OPTIONS = list(options(EngineConfig))
#: Parsers by the type of a field. Other fields are strings.
_PARSERS: dict[Any, Callable[[str], Any]] = {
    int: int,
    int | None: int,
    float: float,
    tuple[int, ...]: sizes,
    tuple[int, ...] | None: sizes,
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each option. It sets the attribute with the name of the option's path."""
    for option in OPTIONS:
        how: dict[str, Any] = (
            {"action": argparse.BooleanOptionalAction}
            if option.type is bool
            else {"type": _PARSERS.get(option.type, str), "metavar": "VALUE"}
        )
        parser.add_argument(option.flag, dest=option.path, help=option.help, **how)


def check_bounds(config: EngineConfig) -> None:
    """Raise ConfigurationError for the first field with a value that cannot work.

    The message names the field and its bounds.
    """
    for problem in _problems(config):
        raise ConfigurationError("ConfigInvalid", problem)


def _problems(config: EngineConfig) -> Iterator[str]:
    for option in OPTIONS:
        if problem := option.problem(config):
            yield f"{option.path} {problem}"
    scheduler, parallel, transfer = config.scheduler, config.parallel, config.kv_transfer
    if transfer.rdma and transfer.transport not in ("ucx", "auto"):
        yield f"kv_transfer.rdma needs transport ucx or auto, got {transfer.transport!r}"
    host, _, port = parallel.coordinator.rpartition(":")
    is_address = host and port.isdecimal() and 0 < int(port) < 65536
    if parallel.enable_expert_parallel and not is_address:
        yield (
            "parallel.coordinator must be host:port of the group's coordinator with "
            f"parallel.enable_expert_parallel, got {parallel.coordinator!r}"
        )
    longest, budget = config.model.max_model_len, scheduler.max_num_batched_tokens
    if not scheduler.enable_chunked_prefill and longest is not None and longest > budget:
        yield (
            f"scheduler.max_num_batched_tokens is {budget}, but without chunked prefill a "
            f"prompt runs in one step and model.max_model_len is {longest}: "
            "raise the first or lower the second"
        )
