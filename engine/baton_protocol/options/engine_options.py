"""The options of `baton-engine`, one per field of EngineConfig, and the checks of their values."""

from __future__ import annotations

from collections.abc import Iterator

from baton_protocol.options.config import EngineConfig
from baton_protocol.options.option import options

OPTIONS = tuple(options(EngineConfig))


def problems(config: EngineConfig) -> Iterator[tuple[str, str]]:
    """Yield (path, text) for each field with a value that cannot work.

    The path and the text, joined by a space, form an error message that names the valid values.
    """
    for option in OPTIONS:
        if problem := option.problem(config):
            yield option.path, problem
    scheduler, parallel, transfer = config.scheduler, config.parallel, config.kv_transfer
    if transfer.rdma and transfer.transport not in ("ucx", "auto"):
        yield "kv_transfer.rdma", f"needs transport ucx or auto, got {transfer.transport!r}"
    host, _, port = parallel.coordinator.rpartition(":")
    is_address = host and port.isdecimal() and 0 < int(port) < 65536
    if parallel.enable_expert_parallel and not is_address:
        yield (
            "parallel.coordinator",
            "must be host:port of the group's coordinator with "
            f"parallel.enable_expert_parallel, got {parallel.coordinator!r}",
        )
    longest, budget = config.model.max_model_len, scheduler.max_num_batched_tokens
    if not scheduler.enable_chunked_prefill and longest is not None and longest > budget:
        yield (
            "scheduler.max_num_batched_tokens",
            f"is {budget}, but without chunked prefill a prompt runs in one step, and "
            f"model.max_model_len is {longest}: raise scheduler.max_num_batched_tokens or lower "
            "model.max_model_len",
        )
    for name in ("capture_sizes", "compile_sizes"):
        sizes = getattr(config.compilation, name)
        if any(not 0 < size <= budget for size in sizes or ()):
            yield (
                f"compilation.{name}",
                f"must be numbers of tokens of a step, 1 to max_num_batched_tokens={budget}, "
                f"got {sizes}",
            )
    if not scheduler.enable_chunked_prefill and scheduler.target_itl_s:
        yield "scheduler.target_itl_s", "needs scheduler.enable_chunked_prefill"
