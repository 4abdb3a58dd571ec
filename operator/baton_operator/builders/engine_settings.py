"""The fields of the spec that set options of `baton-engine`, and the flags in `extraArgs`."""

from __future__ import annotations

import argparse
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn

import msgspec

from baton_operator import names
from baton_operator.api.field_types import quantity_bytes
from baton_operator.api.llmservice import KVTransfer
from baton_operator.api.spec_engine import Engine
from baton_operator.builders.resolved_service import ResolvedService
from baton_protocol.options.config import EngineConfig
from baton_protocol.options.engine_options import OPTIONS, problems
from baton_protocol.options.option import Option, add_flags, set_field

#: Folders of the volumes that outlive the pods.
COMPILE_CACHE_PATH = "/var/cache/baton"
DIAGNOSTICS_PATH = "/var/log/baton"


class Setting(NamedTuple):
    """A field of the spec, and the option of the engine or coordinator that this field sets."""

    field: str  #: Name of the field in its struct, or its path in the spec.
    option: str  #: Path of the option in the configuration.
    convert: Callable[[Any], Any] = lambda value: value  #: Converts the field's value.
    role: names.MemberRole | None = None  #: The only role that reads the option. None: both.


#: Fields of `Engine`.
ENGINE = (
    Setting("device", "device"),
    Setting("block_size", "cache.block_size"),
    Setting("num_blocks", "cache.num_blocks"),
    Setting("kv_cache_memory", "cache.memory_bytes", quantity_bytes),
    Setting(
        "gpu_memory_utilization_percent",
        "cache.gpu_memory_utilization",
        lambda percent: percent / 100,
    ),
    Setting("offload_memory", "cache.offload_memory_bytes", quantity_bytes),
    Setting("swap_memory", "cache.swap_memory_bytes", quantity_bytes),
    Setting("enable_prefix_caching", "cache.enable_prefix_caching"),
    Setting("max_num_batched_tokens", "scheduler.max_num_batched_tokens"),
    Setting("long_prefill_token_threshold", "scheduler.long_prefill_token_threshold"),
    Setting(
        "target_itl_milliseconds",
        "scheduler.target_itl_s",
        lambda milliseconds: milliseconds / 1000,
    ),
    Setting("max_num_seqs", "scheduler.max_num_seqs"),
    Setting("max_queue", "scheduler.max_queue"),
    Setting("scheduling_policy", "scheduler.policy"),
    Setting("preemption_mode", "scheduler.preemption_mode"),
    Setting("async_scheduling", "scheduler.async_scheduling"),
    Setting("num_threads", "num_threads"),
    Setting("step_timeout_seconds", "parallel.step_timeout_s"),
    Setting("enforce_eager", "compilation.enforce_eager"),
    Setting("compilation_mode", "compilation.mode"),
    Setting("cudagraph_mode", "compilation.cudagraph_mode"),
    Setting("compile_cache", "compilation.cache_dir", lambda _: COMPILE_CACHE_PATH),
    Setting("diagnostics", "observability.profiler_dir", lambda _: DIAGNOSTICS_PATH),
    Setting("diagnostics", "observability.crash_dump_dir", lambda _: DIAGNOSTICS_PATH),
    Setting("log_iterations", "observability.log_iterations"),
    Setting("count_nans_in_logits", "observability.count_nans_in_logits"),
)
#: Fields of `KVTransfer`.
KV_TRANSFER = (
    Setting("transport", "kv_transfer.transport"),
    Setting("rdma", "kv_transfer.rdma"),
    Setting("mode", "kv_transfer.mode"),
    Setting("load_failure_policy", "kv_transfer.load_failure_policy"),
    Setting("lease_seconds", "kv_transfer.lease_s", role="prefill"),
    Setting("load_timeout_seconds", "kv_transfer.load_timeout_s", role="decode"),
    Setting("max_inflight_memory", "kv_transfer.max_inflight_bytes", quantity_bytes),
    Setting("staging_memory", "kv_transfer.staging_bytes", quantity_bytes),
)
#: Fields of the spec from which the operator computes options, by option.
COMPUTED = {
    "model.path": "model.uri",
    "model.served_name": "model.servedName",
    "model.runner": "model.runner",
    "model.dtype": "model.dtype",
    "model.quantization": "model.quantization",
    "model.max_model_len": "model.maxModelLen",
    "kv_transfer.role": "prefill",
    "parallel.tensor_parallel_size": "{role}.parallelism.tensor",
    "parallel.pipeline_parallel_size": "decode.parallelism.pipeline",
    "parallel.enable_expert_parallel": "decode.parallelism.expert",
    "parallel.coordinator": "decode.parallelism.expert",
    "parallel.num_redundant_experts": "decode.parallelism.redundantExperts",
    "drain_timeout_s": "drainTimeoutSeconds",
}
#: Options that name code to import. `extraArgs` cannot set them.
CODE = frozenset({"parallel.executor_class", "parallel.worker_class", "scheduler.scheduler_class"})


def configure(
    resolved: ResolvedService, role: names.MemberRole, own: dict[str, Any]
) -> EngineConfig:
    """Return the configuration of `baton-engine` in pods of `role`.

    Args:
        own: values that the operator itself sets, by option, such as `kv_transfer.role`.
            `extraArgs` cannot set these options.

    Raises:
        ValueError: an extra argument is refused, or a value is out of bounds. The message names the
            field of the spec.
    """
    values = dict(own)
    # Fields of the spec by option.
    fields = {option: field.format(role=role) for option, field in COMPUTED.items()}
    group = resolved.group(role)
    override = group.engine if group else None
    for section, struct, settings in (
        ("engine", resolved.engine(role), ENGINE),
        ("kvTransfer", resolved.spec.kv_transfer, KV_TRANSFER),
    ):
        for setting in settings:
            level = "" if getattr(override, setting.field, None) is None else f"{role}."
            fields[setting.option] = f"{level}{section}.{_API_NAMES[setting.field]}"
            value = getattr(struct, setting.field)
            if value is not None and setting.role in (None, role):
                values[setting.option] = setting.convert(value)
    sources = dict(fields)
    for option, value, source in _extra_options(resolved, role):
        if option.path in fields:
            raise ValueError(
                f"{source}: remove {option.flag}, and set the field {fields[option.path]}"
            )
        if option.path in CODE:
            raise ValueError(
                f"{source}: {option.flag} names code that the engine would execute; remove it, or "
                f"add it to the command of the container in {role}.template"
            )
        if option.path in own:
            raise ValueError(f"{source}: the operator sets {option.flag}")
        values[option.path], sources[option.path] = value, f"{source}: {option.flag}"
    content: dict[str, Any] = {}
    for path, value in values.items():
        set_field(content, path, value)
    config = msgspec.convert(content, EngineConfig)
    if found := [f"{sources.get(path, path)} {problem}" for path, problem in problems(config)]:
        raise ValueError("; ".join(found))
    return config


def name_fields(message: str) -> str:
    """Return an engine's `message`, with the name of the spec field added after each option.

    Only options whose path has a section, such as `cache.block_size`, are recognized.
    """

    def with_field(found: re.Match[str]) -> str:
        option = found[0]
        field = _FIELDS.get(option, option)
        return option if field == option else f"{option} ({field})"

    return re.sub(r"\b[a-z_]+\.[a-z_]+\b", with_field, message)


def _extra_options(
    resolved: ResolvedService, role: names.MemberRole
) -> Iterator[tuple[Option, Any, str]]:
    """Yield (option, value, field of the spec) for each flag in `extraArgs`.

    Raises:
        ValueError: a flag is unknown or its value has the wrong type. The message names the field.
    """
    num_of_service = len(resolved.spec.engine.extra_args or ())
    # (field of the spec, [flag, *values]). Each flag is parsed alone, so that errors name it.
    flags: list[tuple[str, list[str]]] = []
    for index, word in enumerate(resolved.engine(role).extra_args or ()):
        if not word.startswith("--") and index not in (0, num_of_service):
            flags[-1][1].append(word)
        elif index < num_of_service:
            flags.append((f"engine.extraArgs[{index}]", [word]))
        else:
            flags.append((f"{role}.engine.extraArgs[{index - num_of_service}]", [word]))
    for source, words in flags:
        try:
            yield *_parse(words), source
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from None


def _parse(words: list[str]) -> tuple[Option, Any]:
    """Return (option, value) for one flag. Raise ValueError if the flag or value is invalid."""
    parsed = vars(_parser().parse_args(words))
    for option in OPTIONS:
        if parsed[option.path] is not None:
            return option, parsed[option.path]
    raise ValueError(f"{words[0]} is not a flag of baton-engine")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


@functools.cache
def _parser() -> argparse.ArgumentParser:
    parser = _Parser(add_help=False, allow_abbrev=False)
    add_flags(parser, OPTIONS)
    return parser


#: Names of fields in the API.
_API_NAMES = {
    field.name: field.encode_name
    for struct in (Engine, KVTransfer)
    for field in msgspec.structs.fields(struct)
}
#: Fields of the spec by option, without the role that may override them.
_FIELDS = {
    **{option: field.removeprefix("{role}.") for option, field in COMPUTED.items()},
    **{
        setting.option: f"{section}.{_API_NAMES[setting.field]}"
        for section, settings in (("engine", ENGINE), ("kvTransfer", KV_TRANSFER))
        for setting in settings
    },
}
