"""The ServiceAccount of engines and coordinator."""

from __future__ import annotations

from baton_kube.client import Object
from baton_operator import names
from baton_operator.builders.resolved_service import ResolvedService


def build(resolved: ResolvedService) -> Object:
    """Return the ServiceAccount of engines and coordinator. Their pods mount no token."""
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": resolved.metadata(names.engine_account_name(resolved.name)),
        "automountServiceAccountToken": False,
    }
