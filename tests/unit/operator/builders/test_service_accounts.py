"""The accounts of the pods: only the gateway has rights, to watch pods and Services."""

from __future__ import annotations

from baton_operator.builders import service_accounts
from support.operator.services import resolved


def test_the_account_of_engines_has_no_token() -> None:
    account = service_accounts.engine_account(resolved())
    assert account["metadata"]["name"] == "demo-engine"
    assert account["automountServiceAccountToken"] is False


def test_the_gateway_may_only_watch_pods_and_services() -> None:
    service = resolved()
    binding, role = (
        service_accounts.gateway_role_binding(service),
        service_accounts.gateway_role(service),
    )
    account = service_accounts.gateway_account(service)["metadata"]
    assert role["rules"] == [
        {"apiGroups": [""], "resources": ["pods", "services"], "verbs": ["list", "watch"]}
    ]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert binding["subjects"] == [
        {
            "kind": "ServiceAccount",
            "name": account["name"],
            "namespace": account["namespace"],
        }
    ]
