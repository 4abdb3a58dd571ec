"""The pods that the autoscaler scrapes, and its reports of faults."""

from __future__ import annotations

from baton_operator.autoscale.inputs import targets_of
from baton_operator.names import ANNOTATION_DRAINING
from support.operator.autoscale_pods import FakePod, scraper, serving
from support.operator.services import resolved


async def test_a_fault_of_a_pod_is_reported_with_its_name_and_affects_no_other() -> None:
    faults = ("error", "garbage", "long", "silent", "")
    pods = [FakePod(f"demo-decode-{number}", "decode") for number in range(len(faults))]
    gone = FakePod("demo-decode-9", "decode")
    for pod, fault in zip(pods, faults, strict=True):
        pod.fault = fault
    async with scraper(timeout_s=1.0, max_bytes=2**19) as (scraping, results), serving(*pods):
        scraped = await scraping.scrape(
            targets_of(resolved(), [pod.object for pod in (*pods, gone)])
        )
    assert list(scraped.samples) == ["uid-demo-decode-4/0"]
    for number, message in enumerate(
        ("HTTP 500", "no metric of an engine", "longer than 524288 bytes", "within 1 s")
    ):
        assert message in scraped.errors[f"demo-decode-{number}"]
    assert "Cannot connect" in scraped.errors["demo-decode-9"]
    counted = {
        sample.labels["result"]: sample.value
        for sample in results.collect()[0].samples
        if "total" in sample.name
    }
    assert counted == {"ok": 1, "error": 5}


def test_only_serving_and_draining_containers_are_scraped() -> None:
    ready, loading, draining = (FakePod(f"demo-decode-{number}", "decode") for number in range(3))
    loading.is_ready = draining.is_ready = False
    ready.restarts = 2
    leaving = draining.object
    leaving["metadata"]["annotations"] = {ANNOTATION_DRAINING: "true"}
    gateway = FakePod("demo-gateway-x", None)
    targets = targets_of(resolved(), [ready.object, loading.object, leaving, gateway.object])
    assert [(target.pod, target.role) for target in targets] == [
        ("demo-decode-0", "decode"),
        ("demo-decode-2", "decode"),
        ("demo-gateway-x", None),
    ]
    assert targets[0].container == "uid-demo-decode-0/2"
    assert targets[0].url == f"http://{ready.host}:8000/metrics"
    secure = resolved(gateway={"tls": {"secretName": "certificate"}})
    [target] = targets_of(secure, [gateway.object])
    assert target.url == f"http://{gateway.host}:8081/metrics", "not the port of clients"
