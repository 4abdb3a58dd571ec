"""The ServiceAccount of engines and coordinator. It has no rights, and its token is not mounted."""

from __future__ import annotations

from baton_kube.client import Object
from baton_operator import names
from baton_operator.builders.resolved_service import ResolvedService


def service_account(resolved: ResolvedService) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": resolved.metadata(names.engine_account_name(resolved.name)),
        "automountServiceAccountToken": False,
    }
