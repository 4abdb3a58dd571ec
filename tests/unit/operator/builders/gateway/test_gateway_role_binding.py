"""The RoleBinding of the gateway's ServiceAccount to the gateway's Role."""

from __future__ import annotations

from baton_operator.builders.gateway import gateway_account, gateway_role, gateway_role_binding
from support.operator.services import resolved


def test_the_only_subject_is_the_account_of_the_gateway() -> None:
    binding = gateway_role_binding.build(resolved())
    account = gateway_account.build(resolved())["metadata"]
    assert binding["subjects"] == [
        {
            "kind": "ServiceAccount",
            "name": account["name"],
            "namespace": account["namespace"],
        }
    ]


def test_the_account_gets_the_role_of_the_gateway() -> None:
    binding, role = gateway_role_binding.build(resolved()), gateway_role.build(resolved())
    assert binding["roleRef"] == {
        "apiGroup": "rbac.authorization.k8s.io",
        "kind": role["kind"],
        "name": role["metadata"]["name"],
    }
    assert binding["metadata"]["namespace"] == role["metadata"]["namespace"]


def test_the_llmservice_owns_the_binding() -> None:
    metadata = gateway_role_binding.build(resolved())["metadata"]
    assert metadata["name"] == "demo-gateway"
    (owner,) = metadata["ownerReferences"]
    assert (owner["kind"], owner["uid"], owner["controller"]) == ("LLMService", "uid-1", True)
