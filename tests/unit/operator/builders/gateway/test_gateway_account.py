"""The gateway's ServiceAccount."""

from __future__ import annotations

from baton_operator.builders import engine_account
from baton_operator.builders.gateway import gateway_account, gateway_deployment
from support.operator.services import resolved


def test_gateway_pods_use_the_account_and_engines_use_another() -> None:
    account = gateway_account.build(resolved())["metadata"]
    pod = gateway_deployment.build(resolved())["spec"]["template"]["spec"]
    assert pod["serviceAccountName"] == account["name"] == "demo-gateway"
    assert account["name"] != engine_account.build(resolved())["metadata"]["name"]


def test_the_llmservice_owns_the_account() -> None:
    metadata = gateway_account.build(resolved())["metadata"]
    assert metadata["namespace"] == resolved().namespace
    assert metadata["labels"]["app.kubernetes.io/component"] == "gateway"
    (owner,) = metadata["ownerReferences"]
    assert (owner["kind"], owner["uid"], owner["controller"]) == ("LLMService", "uid-1", True)
