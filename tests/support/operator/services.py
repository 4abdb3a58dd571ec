"""Services and pods for the tests of the operator's pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

from baton_kube.client import Object
from baton_operator.api.llmservice import decode_spec
from baton_operator.builders import config_maps
from baton_operator.builders.resolved_service import ResolvedService
from baton_operator.builders.restrictions import Restrictions
from baton_operator.names import GROUP, ConfiguredRole, Key
from baton_operator.observe.freshness import Freshness
from baton_operator.observe.observation import Observation
from baton_protocol.kv_compatibility import KVCompatibility

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def resolved(
    name: str = "demo",
    coordinator: str | None = None,
    key_name: str = "",
    restrictions: Restrictions | None = None,
    **spec: Any,
) -> ResolvedService:
    """Return a resolved service with the spec `spec`."""
    body = {"model": {"uri": "file:///models/x"}, **spec}
    return ResolvedService(
        name=name,
        namespace="default",
        uid="uid-1",
        spec=decode_spec(body),
        coordinator=coordinator,
        key_name=key_name,
        restrictions=restrictions,
    )


def service(conditions: list[Object] | None = None, generation: int = 1) -> Object:
    metadata = {"name": "demo", "namespace": "default", "uid": "uid-1", "generation": generation}
    return {
        "metadata": metadata,
        "spec": {},
        "status": {"conditions": conditions} if conditions else {},
    }


def observed(
    llmservice: Object | None = None,
    *,
    cluster_ip: str | None = None,
    kv: Mapping[str, KVCompatibility] | None = None,
) -> Observation:
    """Return the observed state of a service without pods.

    Args:
        llmservice: the LLMService; None: `service()`.
        cluster_ip: address of the gateway's Service; None: the Service does not exist.
        kv: KV compatibility that engines reported, by pod name.
    """
    gateway = {
        "metadata": {
            "name": "demo-gateway",
            "ownerReferences": [{"controller": True, "uid": "uid-1"}],
        },
        "spec": {"clusterIP": cluster_ip},
    }
    return Observation(
        key=Key("default", "demo"),
        freshness=Freshness(),
        service=service() if llmservice is None else llmservice,
        pods=[],
        strays=[],
        objects={} if cluster_ip is None else {("Service", "demo-gateway"): gateway},
        kinds={"Service"},
        key_secret=None,
        service_key=None,
        members={"decode": [], "prefill": []},
        kv=kv or {},
    )


def pod(
    name: str = "demo-decode-0",
    *,
    ready: bool = False,
    revision: str = "new",
    draining: bool = False,
    state: Object | None = None,
    last: Object | None = None,
    restarts: int = 0,
    conditions: list[Object] | None = None,
    phase: str = "Running",
    status: Object | None = None,
) -> Object:
    """Return a member pod of a service, as the API server returns it."""
    container = {
        "name": "engine",
        "restartCount": restarts,
        "state": state or {"running": {"startedAt": (NOW - timedelta(hours=1)).isoformat()}},
        "lastState": {"terminated": last} if last else {},
    }
    is_ready = {"type": "Ready", "status": "True" if ready else "False"}
    return {
        "metadata": {
            "name": name,
            "labels": {f"{GROUP}/role": "decode", f"{GROUP}/revision": revision},
            "annotations": {f"{GROUP}/draining": "true"} if draining else {},
        },
        "status": {
            "phase": phase,
            "conditions": [is_ready, *(conditions or [])],
            "containerStatuses": [container],
            **(status or {}),
        },
    }


def decoded_config(role: ConfiguredRole, type_: type[Any], **spec: Any) -> Any:
    """Return the configuration of a role as the component decodes it."""
    config_map = config_maps.build(resolved(**spec), role)
    return msgspec.json.decode(config_map["data"][f"{role}.json"], type=type_)
