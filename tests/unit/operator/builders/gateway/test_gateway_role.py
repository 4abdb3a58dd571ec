"""The gateway's account has the right to watch pods and Services, and no other right."""

from __future__ import annotations

from baton_operator.builders.gateway import gateway_account, gateway_role, gateway_role_binding
from support.operator.services import resolved


def test_the_gateway_may_only_watch_pods_and_services() -> None:
    service = resolved()
    binding, role = gateway_role_binding.build(service), gateway_role.build(service)
    account = gateway_account.build(service)["metadata"]
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
