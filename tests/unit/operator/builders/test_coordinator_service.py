"""The Service through which ranks and operator connect to the coordinator."""

from __future__ import annotations

from typing import Any

from baton_operator.builders import coordinator_deployment, coordinator_service
from baton_operator.builders.member_pods import MemberTemplate
from support.operator.services import resolved

RANKS: dict[str, Any] = {"decode": {"replicas": 2, "parallelism": {"expert": True}}}


def test_the_service_selects_the_coordinator_and_no_rank() -> None:
    selector = coordinator_service.build(resolved(**RANKS))["spec"]["selector"]
    deployment = coordinator_deployment.build(resolved(**RANKS))
    assert selector.items() <= deployment["spec"]["template"]["metadata"]["labels"].items()
    ranks = MemberTemplate(resolved(coordinator="10.0.0.1", **RANKS), "decode").pod(0)
    assert not selector.items() <= ranks["metadata"]["labels"].items()
    members = MemberTemplate(resolved(), "decode").pod(0)
    assert not selector.items() <= members["metadata"]["labels"].items()


def test_each_port_of_the_service_leads_to_the_port_of_the_same_name() -> None:
    ports = coordinator_service.build(resolved(**RANKS))["spec"]["ports"]
    assert [(port["port"], port["targetPort"]) for port in ports] == [
        (5560, "ranks"),
        (8001, "http"),
    ]
    assert [port["name"] for port in ports] == ["ranks", "http"]
    deployment = coordinator_deployment.build(resolved(**RANKS))
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert {port["name"]: port["containerPort"] for port in container["ports"]} == {
        port["targetPort"]: port["port"] for port in ports
    }


def test_the_llmservice_owns_the_service_which_has_an_address() -> None:
    service = coordinator_service.build(resolved(**RANKS))
    assert service["metadata"]["name"] == "demo-coordinator"
    (owner,) = service["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["uid"], owner["controller"]) == ("LLMService", "uid-1", True)
    assert service["spec"]["type"] == "ClusterIP"
    assert "clusterIP" not in service["spec"]  # the API server chooses it
