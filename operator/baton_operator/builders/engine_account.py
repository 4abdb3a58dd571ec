"""The ServiceAccount of engines and coordinator. It has no rights, and its token is not mounted."""

from __future__ import annotations

from baton_kube.client import Object
from baton_operator import names
from baton_operator.builders.owner import Owner


def service_account(owner: Owner) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": owner.metadata(names.engine_account_name(owner.name)),
        "automountServiceAccountToken": False,
    }
