"""The gateway's ServiceAccount."""

from __future__ import annotations

from baton_kube.client import Object
from baton_operator import names
from baton_operator.builders.resolved_service import ResolvedService


def build(resolved: ResolvedService) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": resolved.metadata(names.gateway_name(resolved.name), "gateway"),
    }
