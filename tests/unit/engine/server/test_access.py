"""Access control: the admitted requests, and the log of refused clients."""

from __future__ import annotations

from baton_engine.server.access import LOG_INTERVAL_S, Access
from baton_protocol.service_key import AdminRequest, ServiceKey

KEY = ServiceKey(b"the key of this service")


def refusals(access: Access) -> dict[str, float]:
    """Return the counted refusals by port."""
    return {
        sample.labels["door"]: sample.value
        for metric in access.refusals.collect()
        for sample in metric.samples
        if sample.name == "baton:access_refused_total"
    }


def test_refusals_are_logged_once_per_interval_with_their_number(caplog) -> None:
    now = [0.0]
    access = Access(KEY, clock=lambda: now[0])
    for _ in range(100):
        access.refused("http")
    access.refused("engine", 7)
    now[0] = LOG_INTERVAL_S
    access.refused("http")
    lines = [record.getMessage() for record in caplog.records]
    assert [next(word for word in line.split() if word.isdecimal()) for line in lines] == [
        "1",
        "7",
        "100",
    ]
    assert refusals(access) == {"http": 101, "engine": 7}


def test_only_the_header_of_the_key_admits_and_other_requests_are_counted() -> None:
    request = AdminRequest("POST", "/sleep", "10.0.0.1:8001")
    header = KEY.sign(request)
    access = Access(KEY)
    assert access.admits(header, request)
    for refused in (None, "", ServiceKey(b"the key of another service").sign(request)):
        assert not access.admits(refused, request)
    assert refusals(access)["http"] == 3
    assert Access(None).admits(None, request)
