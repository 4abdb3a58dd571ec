"""The headless Service that gives member pods their DNS names."""

from __future__ import annotations

import pytest

from baton_operator.builders import headless_service
from baton_operator.builders.gateway import gateway_deployment
from baton_operator.builders.member_pods import MemberTemplate
from baton_operator.names import MEMBER_ROLES, MemberRole
from support.operator.services import resolved


@pytest.mark.parametrize("role", MEMBER_ROLES)
def test_members_have_a_dns_name_and_gateways_have_none(role: MemberRole) -> None:
    service = headless_service.build(resolved(prefill={}))
    selector = service["spec"]["selector"]
    member = MemberTemplate(resolved(prefill={}), role).pod(0)
    assert selector.items() <= member["metadata"]["labels"].items()
    assert member["spec"]["subdomain"] == service["metadata"]["name"] == "demo-members"
    front = gateway_deployment.build(resolved())["spec"]["template"]["metadata"]["labels"]
    assert not selector.items() <= front.items()


def test_the_service_is_headless_and_names_pods_that_are_not_ready() -> None:
    spec = headless_service.build(resolved())["spec"]
    assert spec["clusterIP"] == "None"
    assert spec["publishNotReadyAddresses"] is True


def test_the_ports_are_those_of_the_members() -> None:
    ports = headless_service.build(resolved())["spec"]["ports"]
    (engine,) = MemberTemplate(resolved(), "decode").pod(0)["spec"]["containers"]
    assert {port["name"]: port["port"] for port in ports} == {
        port["name"]: port["containerPort"] for port in engine["ports"]
    }
    assert all(port["port"] == port["targetPort"] for port in ports)


def test_the_llmservice_owns_the_service() -> None:
    (owner,) = headless_service.build(resolved())["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["uid"], owner["controller"]) == ("LLMService", "uid-1", True)
