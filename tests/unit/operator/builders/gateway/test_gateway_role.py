"""The gateway's Role: the right to watch pods and Services, and no other right."""

from __future__ import annotations

from baton_operator.builders.gateway import gateway_role
from support.operator.services import resolved


def test_the_gateway_may_only_watch_pods_and_services() -> None:
    assert gateway_role.build(resolved())["rules"] == [
        {"apiGroups": [""], "resources": ["pods", "services"], "verbs": ["list", "watch"]}
    ]
