"""The Ingress of the gateway."""

from __future__ import annotations

from baton_operator.builders.absent import Absent
from baton_operator.builders.gateway import ingress
from baton_operator.reconcile.desired import compute_desired
from support.operator.services import resolved


def test_an_ingress_is_built_only_on_request() -> None:
    assert ingress.build(resolved()) == Absent("Ingress", "demo-gateway")
    assert ("Ingress", "demo-gateway") in compute_desired(resolved(), None).absent
    asked = {
        "host": "h.example",
        "className": "nginx",
        "annotations": {"a/b": "c"},
        "tls": {"secretName": "s"},
    }
    built = ingress.build(resolved(gateway={"ingress": asked}))
    assert built["spec"]["rules"][0]["host"] == "h.example"
    assert built["spec"]["ingressClassName"] == "nginx"
    assert built["spec"]["tls"] == [{"hosts": ["h.example"], "secretName": "s"}]
    assert built["metadata"]["annotations"] == {"a/b": "c"}
