"""ConfigMaps with the configuration of engines and gateway.

The name of a ConfigMap contains a hash of the configuration, and the ConfigMap is immutable. So the
configuration of a running pod never changes.
"""

from __future__ import annotations

import functools
from typing import Any

import msgspec

from baton_kube.client import Object
from baton_operator import names
from baton_operator.api.llmservice import value_at
from baton_operator.api.spec_groups import DEFAULT_HOLD_SECONDS, DecodeAutoscaling
from baton_operator.builders import engine_settings, model_volume, service_key_secret
from baton_operator.builders.engine_settings import Setting
from baton_operator.builders.resolved_service import ResolvedService
from baton_protocol.options.config import (
    ENGINE_HTTP_PORT,
    ENGINE_PORT,
    KV_PORT,
    AccessConfig,
    DiscoveryConfig,
    EngineConfig,
    GatewayConfig,
    KVRole,
    ModelConfig,
)
from baton_protocol.options.option import set_field
from baton_protocol.topology import COORDINATOR_PORT

#: Folder of the configuration in every container.
MOUNT_PATH = "/etc/baton"
#: Folders of the Secrets in the gateway's container.
API_KEYS_PATH = "/etc/baton-api-keys"
TLS_PATH = "/etc/baton-tls"


def _hold_s(autoscaling: DecodeAutoscaling) -> float | None:
    """Return for how many seconds the gateway holds a request while the service has no engine.

    None: the decode group never scales to zero.
    """
    if autoscaling.min_replicas > 0:
        return None
    return float(autoscaling.hold_seconds or DEFAULT_HOLD_SECONDS)


#: Options of `baton-engine` that are equal in all services.
ENGINE_CONSTANTS = {
    "kv_transfer.port": KV_PORT,
    "parallel.rank_name": "",  # empty: the engine reads $POD_NAME
    "engine_port": ENGINE_PORT,
    "http_port": ENGINE_HTTP_PORT,
    "service_key_file": service_key_secret.FILE,
}
#: Fields of the spec that set options of `baton-gateway`.
GATEWAY = (
    Setting("gateway.api_keys", "access.api_keys_dir", lambda _: API_KEYS_PATH),
    Setting("gateway.api_keys.cache_sharing", "access.cache_sharing"),
    Setting("gateway.api_keys.shared_cache_salts", "access.shared_cache_salts", tuple),
    Setting("gateway.tls", "access.tls_dir", lambda _: TLS_PATH),
    Setting("gateway.cors.allowed_origins", "access.allowed_origins", tuple),
    Setting("gateway.limits.max_concurrent_per_key", "access.max_concurrent_per_client"),
    Setting("gateway.limits.min_priority", "access.min_priority"),
    Setting("gateway.limits.max_prompt_tokens", "access.max_prompt_tokens"),
    Setting("gateway.limits.max_completion_tokens", "access.max_completion_tokens"),
    Setting("gateway.max_concurrent_requests", "max_concurrent_requests"),
    Setting("gateway.generation_config", "generation_config"),
    Setting("model.tool_parser", "tool_parser"),
    Setting("model.reasoning_parser", "reasoning_parser"),
    Setting("gateway.prefill_threshold_tokens", "prefill_threshold_tokens"),
    Setting("gateway.queue_timeout_seconds", "queue_wait_s"),
    Setting("gateway.resume_timeout_seconds", "resume_wait_s"),
    Setting("gateway.stall_timeout_seconds", "stall_timeout_s"),
    Setting("gateway.inter_token_timeout_seconds", "inter_token_timeout_s"),
    Setting("gateway.request_timeout_seconds", "request_timeout_s"),
    Setting("decode.autoscaling", "hold_s", _hold_s),
    Setting("drain_timeout_seconds", "drain_timeout_s", float),
)


def build(resolved: ResolvedService, role: names.ConfiguredRole) -> Object:
    """Return the ConfigMap with the configuration of `role`, under the key `<role>.json`."""
    config = gateway_config(resolved) if role == "gateway" else engine_config(resolved, role)
    text = msgspec.json.format(msgspec.json.encode(_set_fields(config)), indent=2).decode() + "\n"
    data = {f"{role}.json": text}
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": resolved.metadata(
            f"{resolved.name}-{role}-config-{names.content_hash(data)}", role
        ),
        "immutable": True,
        "data": data,
    }


def engine_config(resolved: ResolvedService, role: names.MemberRole) -> EngineConfig:
    """Return the configuration of `baton-engine` in pods of `role`.

    Ranks get the IP address of the coordinator's Service, because pods of a local cluster have no
    cluster DNS. So a new address results in a new revision of the decode pods.

    Raises:
        ValueError: the coordinator's Service has no address yet, or the spec is invalid. The
            message names the field.
    """
    parallelism = resolved.spec.decode.parallelism
    is_rank = role == "decode" and resolved.is_expert_parallel
    coordinator = ""
    if is_rank:
        if resolved.coordinator is None:
            raise ValueError("the coordinator's Service has no address yet")
        coordinator = f"{names.url_host(resolved.coordinator)}:{COORDINATOR_PORT}"
    if not resolved.has_prefill:
        kv_role = KVRole.NONE
    else:
        kv_role = KVRole.PRODUCER if role == "prefill" else KVRole.CONSUMER
    served = msgspec.structs.asdict(_model_config(resolved, role))
    own: dict[str, Any] = {
        **ENGINE_CONSTANTS,
        **{f"model.{name}": value for name, value in served.items()},
        "kv_transfer.role": kv_role,
        "parallel.tensor_parallel_size": resolved.tensor_parallel_size(role),
        "parallel.pipeline_parallel_size": parallelism.pipeline if role == "decode" else 1,
        "parallel.enable_expert_parallel": is_rank,
        "parallel.coordinator": coordinator,
        "parallel.num_redundant_experts": parallelism.redundant_experts if is_rank else 0,
        "drain_timeout_s": float(resolved.spec.drain_timeout_seconds),
    }
    return engine_settings.configure(resolved, role, own)


def gateway_config(resolved: ResolvedService) -> GatewayConfig:
    """Return the configuration of `baton-gateway`."""
    values: dict[str, Any] = {}
    for setting in GATEWAY:
        value = value_at(resolved.spec, setting.field)
        if value is not None and (converted := setting.convert(value)) is not None:
            set_field(values, setting.option, converted)
    return GatewayConfig(
        model=_model_config(resolved, "gateway"),
        discovery=DiscoveryConfig(namespace=resolved.namespace, service=resolved.name),
        access=AccessConfig(**values.pop("access", {})),
        service_key_file=service_key_secret.FILE,
        **values,
    )


def _model_config(resolved: ResolvedService, role: names.ConfiguredRole) -> ModelConfig:
    source = resolved.spec.model
    return ModelConfig(
        path=model_volume.source(source, role, resolved.namespace).path,
        served_name=resolved.served_name,
        runner=source.runner or "auto",
        dtype=source.dtype,
        quantization=source.quantization,
        max_model_len=source.max_model_len,
    )


# Cached, because msgspec resolves the types at each call.
_fields = functools.cache(msgspec.structs.fields)


def _set_fields(config: msgspec.Struct) -> dict[str, Any]:
    """Return the fields of `config` that differ from their defaults, for encoding as JSON.

    Defaults are left out, so that an operator release with other defaults causes no rollout.
    """
    result: dict[str, Any] = {}
    for field in _fields(type(config)):
        value = getattr(config, field.name)
        if field.default is not msgspec.NODEFAULT and value == field.default:
            continue
        result[field.encode_name] = (
            _set_fields(value) if isinstance(value, msgspec.Struct) else value
        )
    return result
