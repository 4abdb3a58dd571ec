"""The gateway's Service shows gateways whether the service is scaled to zero by hand."""

from __future__ import annotations

import msgspec
import pytest

from baton_kube.client import Object
from baton_operator.builders.gateway import gateway_service
from support.operator.services import resolved

ASLEEP = {"minReplicas": 0, "maxReplicas": 2, "itlMilliseconds": 40, "idleSeconds": 60}


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
