"""The gateway's Service: the pods that it selects, and its annotation."""

from __future__ import annotations

import msgspec
import pytest

from baton_kube.client import Object
from baton_operator.builders.gateway import gateway_deployment, gateway_service
from baton_operator.builders.member_pods import MemberTemplate
from support.operator.services import resolved

ASLEEP = {"minReplicas": 0, "maxReplicas": 2, "itlMilliseconds": 40, "idleSeconds": 60}


def test_the_service_selects_gateways_and_no_member() -> None:
    selector = gateway_service.build(resolved())["spec"]["selector"]
    front = gateway_deployment.build(resolved())["spec"]["template"]["metadata"]["labels"]
    assert selector.items() <= front.items()
    member = MemberTemplate(resolved(), "decode").pod(0)["metadata"]["labels"]
    assert not selector.items() <= member.items()


@pytest.mark.parametrize(
    ("decode", "annotations"),
    [
        ({"replicas": 0}, {"serving.baton.dev/scaled-to-zero": "true"}),
        ({"replicas": 1}, None),
        ({"replicas": 0, "autoscaling": ASLEEP}, None),
    ],
    ids=["by hand", "not scaled to zero", "by the autoscaler"],
)
def test_the_service_is_annotated_if_no_request_may_start_an_engine(
    decode: Object, annotations: Object | None
) -> None:
    service = resolved(decode=decode)
    if "autoscaling" in decode:
        service = msgspec.structs.replace(service, sizes={"decode": 0})
    assert gateway_service.build(service)["metadata"].get("annotations") == annotations
