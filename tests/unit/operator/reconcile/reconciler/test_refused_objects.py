"""Several objects of a service are refused at once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from baton_kube.client import Object
from support.operator.simulation.api_server import Fault
from support.operator.simulation.simulated_service import Service, settled

SPEC: Object = {"model": {"uri": "hf://o/m"}, "decode": {"replicas": 1}}
#: The simulated cluster has no Gateway API.
ROUTE: Object = {"gateway": {"httpRoute": {"parentRefs": [{"name": "public"}]}}}


@pytest.fixture
def service() -> Iterator[Service]:
    """Return a service at rest whose HTTPRoute cannot be written."""
    with settled(SPEC) as service:
        service.patch(ROUTE)
        service.rounds(20)
        assert service.condition()["reason"] == "GatewayAPIMissing"
        yield service


def config_maps(service: Service) -> set[str]:
    """Return the names of the decode pods' ConfigMaps."""
    names = {each["metadata"]["name"] for each in service.server.list("configmaps")}
    return {name for name in names if "decode" in name}


def test_a_missing_config_map_is_reported_before_other_refusals(service: Service) -> None:
    (name,) = config_maps(service)
    (before,) = service.pods()

    def give_away(config_map: Object) -> None:
        config_map["metadata"]["ownerReferences"][0]["uid"] = service.pods()[0]["metadata"]["uid"]

    service.server.edit("configmaps", name, give_away)
    service.reconcile()
    assert service.condition()["reason"] == "NameConflict"
    assert service.pods() == [before]


def test_an_error_behind_a_refusal_is_retried(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    service.patch({"gateway": {"replicas": 2}})
    service.reconcile({0: Fault.BROKEN}, hit_writes=True)
    assert service.condition()["reason"] == "GatewayAPIMissing"
    assert "reconcile of default/demo failed, retrying" in caplog.text


def test_a_service_that_waits_for_its_route_writes_nothing(service: Service) -> None:
    before = config_maps(service)
    service.patch({"engine": {"maxNumSeqs": 3}})
    service.rounds(20)
    after = config_maps(service)
    assert len(after) == 1, "the ConfigMap of the old revision was not deleted"
    assert after != before
    service.reconcile()
    assert service.client.requests == 7, (
        "expected the five reads of a service at rest, and two that look for the Gateway API"
    )
    assert not service.client.writes
