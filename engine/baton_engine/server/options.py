"""The options of `baton-engine`, one per field of EngineConfig, and the checks of their values."""

from __future__ import annotations

from collections.abc import Iterator

from baton_engine.models.errors import ConfigurationError
from baton_protocol.config import EngineConfig
from baton_protocol.options import options

OPTIONS = list(options(EngineConfig))


def check_bounds(config: EngineConfig) -> None:
    """Raise ConfigurationError if a field has a value that cannot work.

    The message names the first such field and the bounds.
    """
    for problem in _problems(config):
        raise ConfigurationError("InvalidConfig", problem)


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
    if not scheduler.enable_chunked_prefill and scheduler.target_itl_s:
        yield "scheduler.target_itl_s needs scheduler.enable_chunked_prefill"
