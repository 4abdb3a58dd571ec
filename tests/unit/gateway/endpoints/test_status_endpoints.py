"""Models, health, version and metrics, and the port of the metrics."""

from __future__ import annotations

import pytest

from baton_gateway.metrics import GatewayMetrics
from baton_protocol.process import metrics_text
from support.gateway.gateway_rig import GatewayRig


async def test_endpoints_for_models_health_version_and_metrics(rig: GatewayRig) -> None:
    await rig.start(rig.engine("d", "decode"))
    client = rig.client()
    [model] = (await client.models.list()).data
    assert (model.id, model.model_extra["max_model_len"]) == ("m", 256)
    assert (await client.models.retrieve("m")).id == "m"
    assert (await rig.get("/health"))[0] == 200
    assert "version" in (await rig.get("/version"))[1]
    await client.completions.create(model="m", prompt="go")
    text = await rig.scrape()
    assert 'baton:http_requests_total{endpoint="/v1/completions",status="200"} 1.0' in text
    assert 'baton:engines_ready{role="decode"} 1.0' in text


async def test_the_port_of_the_metrics_has_three_routes(rig: GatewayRig) -> None:
    routes = rig.gateway.metrics_app.router.routes()
    assert {(route.method, route.resource.canonical) for route in routes} == {
        (method, path) for method in ("GET", "HEAD") for path in ("/health", "/ready", "/metrics")
    }


def test_many_requests_for_metrics_do_not_block_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, computed = 100.0, []

    def generate(registry: object) -> bytes:
        computed.append(registry)
        return b"%d" % len(computed)

    monkeypatch.setattr(metrics_text, "generate_latest", generate)
    monkeypatch.setattr(metrics_text, "monotonic", lambda: now)
    text = GatewayMetrics().text
    texts = [text.get() for _ in range(2 * metrics_text.MAX_PER_S)]
    assert len(computed) == metrics_text.MAX_PER_S
    assert texts[-1] == b"%d" % len(computed)
    now += 1.0
    assert text.get() != texts[-1]
