"""The autoscaler of a service with HTTP pods: sizes, status and faults."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

from baton_operator.api.llmservice import TopologyStatus
from baton_operator.api.spec_groups import AutoscalingStatus
from baton_operator.autoscale.autoscaler import Autoscaler
from baton_operator.autoscale.inputs import role_states
from baton_operator.autoscale.scrape import Scraper
from baton_operator.autoscale.settings import (
    SCRAPE_S,
    WAKEFUL_SCRAPE_S,
    settings_of,
)
from baton_operator.builders.config_maps import gateway_config
from baton_operator.builders.resolved_service import ResolvedService
from baton_operator.kube.events import Event
from baton_operator.names import Key
from baton_operator.status.report_group import ReportedGroup
from baton_operator.status.report_topology import GroupTopology
from support.operator.autoscale_pods import Clock, FakePod, scraper, serving
from support.operator.services import resolved, service
from support.waiting import until

KEY = Key("default", "demo")
WALL = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
DECODE = {"maxReplicas": 8, "itlMilliseconds": 50}
TO_ZERO = {**DECODE, "minReplicas": 0, "idleSeconds": 60}


def stored(status: AutoscalingStatus | None = None) -> dict[str, Any]:
    """Return the LLMService with this decode status."""
    decode_status = {"decode": {"autoscaling": msgspec.to_builtins(status)}} if status else {}
    return {**service(), "status": decode_status}


class Stand:
    """An autoscaler, the service `demo` and its pods, in simulated time. Tests change the pods."""

    def __init__(
        self, scraping: Scraper, autoscaling: dict[str, Any], *, replicas: int = 1
    ) -> None:
        self.clock = Clock()
        self.scraping = scraping
        self.spec: dict[str, Any] = {"replicas": replicas, "autoscaling": autoscaling}
        self.gateway = FakePod("demo-gateway-x", None)
        self.engines: list[FakePod] = []
        self.stored = stored()
        self.restart()

    def restart(self) -> None:
        """Create a new autoscaler, as after a restart of the operator."""
        self.autoscaler = Autoscaler(self.clock, lambda: WALL)
        self.reconcile()

    def reconcile(self) -> ResolvedService:
        sized = self.autoscaler.apply_sizes(resolved(decode=self.spec), self.stored)
        pods = [pod.object for pod in (self.gateway, *self.engines)]
        group = ReportedGroup(
            role="decode",
            desired=sized.replicas("decode"),
            pods=[engine.object for engine in self.engines],
        )
        self.autoscaler.observe(sized, {"decode": group}, pods)
        if (new := self.autoscaler.status(sized, "decode")) is not None:
            self.stored = stored(new)
        return sized

    async def scrape_and_decide(self, after_s: float = SCRAPE_S) -> bool:
        """Scrape and decide. Return whether the size or the status changed."""
        self.clock.now += after_s
        due = await self.autoscaler.scrape_and_decide(KEY, self.scraping)
        if due:
            self.reconcile()
        return due

    @property
    def reported(self) -> AutoscalingStatus:
        return msgspec.convert(self.stored["status"]["decode"]["autoscaling"], AutoscalingStatus)

    @property
    def news(self) -> list[Event]:
        return self.autoscaler.take_events(resolved(decode=self.spec))

    async def load(self, itl_s: float, rounds: int) -> None:
        """Let every engine generate tokens of this latency between scrapes."""
        for _ in range(rounds):
            for engine in self.engines:
                engine.serve_load(tokens=500, itl_s=itl_s)
            self.gateway.answer(3)
            await self.scrape_and_decide()


async def test_a_missed_target_grows_the_group_with_one_event() -> None:
    async with scraper() as (scraping, _):
        stand = Stand(scraping, DECODE, replicas=2)
        stand.engines = [FakePod(f"demo-decode-{number}", "decode") for number in range(2)]
        async with serving(stand.gateway, *stand.engines):
            stand.reconcile()
            assert (stand.reported.size, stand.reported.reason) == (2, "Initial")
            await stand.load(itl_s=0.1, rounds=8)
            assert stand.reconcile().replicas("decode") >= 4
            scaled = stand.reported
            assert scaled.reason == "ITLAboveTarget"
            assert scaled.last_scale_time == "2026-01-02T03:04:05Z"
            assert "ITL p95 is" in scaled.message
            assert "for a target of 50 ms" in scaled.message
            assert stand.news == [Event("Scaled", scaled.message)]
            assert stand.news == []
            await stand.load(itl_s=0.1, rounds=8)
            assert stand.reported.size == scaled.size, "a decision before the new engines are ready"
            assert stand.reported.reason == "PodsNotReady"


async def test_a_failing_scrape_is_reported_and_changes_no_size() -> None:
    async with scraper(timeout_s=1.0) as (scraping, _):
        stand = Stand(scraping, DECODE, replicas=2)
        stand.engines = [FakePod(f"demo-decode-{number}", "decode") for number in range(2)]
        async with serving(stand.gateway, *stand.engines):
            stand.engines[1].fault = "error"
            stand.reconcile()
            await stand.load(itl_s=0.1, rounds=12)
            assert (stand.reported.size, stand.reported.reason) == (2, "MetricsMissing")
            assert "1 of 2 engines answered" in stand.reported.message
            assert "Pod demo-decode-1: HTTP 500" in stand.reported.message
            assert stand.news == []


async def test_the_size_survives_a_restart_and_shrinks_only_after_a_whole_window() -> None:
    async with scraper() as (scraping, _):
        stand = Stand(scraping, {**DECODE, "scaleDownStabilizationSeconds": 120}, replicas=1)
        stand.stored = stored(
            AutoscalingStatus(size=3, recommended=3, reason="OnTarget", message="as it was")
        )
        stand.engines = [FakePod(f"demo-decode-{number}", "decode") for number in range(3)]
        async with serving(stand.gateway, *stand.engines):
            stand.restart()
            assert stand.reconcile().replicas("decode") == 3, (
                "the size must not be the spec's replicas"
            )
            began, sizes = stand.clock.now, []
            for _ in range(16):
                await stand.load(itl_s=0.02, rounds=1)
                sizes.append((stand.clock.now - began, stand.reported.size))
            assert all(size == 3 for at, size in sizes if at < 120)
            assert sizes[-1][1] == 2, "a step down before the last pod was gone"


@pytest.mark.parametrize(
    ("stored_size", "size"), [(0, 2), (1, 2), (2, 2), (3, 3), (4, 3), (10000, 3)]
)
def test_a_size_in_the_status_is_limited_to_the_bounds(stored_size: int, size: int) -> None:
    autoscaling = {**DECODE, "minReplicas": 2, "maxReplicas": 3}
    written = stored(
        AutoscalingStatus(
            size=stored_size, recommended=stored_size, reason="OnTarget", message="stored"
        )
    )
    autoscaler = Autoscaler()
    sized = autoscaler.apply_sizes(
        resolved(decode={"replicas": 2, "autoscaling": autoscaling}), written
    )
    assert sized.replicas("decode") == size
    status = autoscaler.status(sized, "decode")
    assert status.size == size
    assert (status.reason == "OutOfBounds") == (stored_size != size)


async def test_varying_figures_are_written_once_a_minute() -> None:
    async with scraper() as (scraping, _):
        stand = Stand(scraping, DECODE, replicas=1)
        stand.engines = [FakePod("demo-decode-0", "decode")]
        async with serving(stand.gateway, *stand.engines):
            stand.reconcile()
            written = 0
            for number in range(40):
                stand.engines[0].serve_load(tokens=500, itl_s=0.030 + 0.0005 * number, running=3)
                stand.gateway.answer()
                written += await stand.scrape_and_decide()
            assert stand.reported.size == 1
            assert stand.reported.reason == "OnTarget"
            assert 5 <= written <= 10, "too many writes in ten minutes"


async def test_the_status_of_an_idle_service_is_not_written() -> None:
    async with scraper() as (scraping, _):
        stand = Stand(scraping, DECODE, replicas=1)
        stand.engines = [FakePod("demo-decode-0", "decode")]
        async with serving(stand.gateway, *stand.engines):
            stand.reconcile()
            for _ in range(12):
                await stand.scrape_and_decide()
            assert not any([await stand.scrape_and_decide() for _ in range(20)])


async def test_a_service_scales_to_zero_and_back_for_a_held_request() -> None:
    async with scraper() as (scraping, _):
        stand = Stand(scraping, TO_ZERO)
        engine = FakePod("demo-decode-0", "decode")
        stand.engines = [engine]
        async with serving(stand.gateway, engine):
            stand.reconcile()
            stand.gateway.answer()
            await stand.scrape_and_decide()
            answered_at = stand.clock.now
            while stand.reported.size and stand.clock.now < answered_at + 300:
                await stand.scrape_and_decide(5.0)
            assert stand.reported.reason == "Idle"
            assert 60 <= stand.clock.now - answered_at <= 65
            stand.engines = []
            stand.reconcile()
            for _ in range(30):
                await stand.scrape_and_decide(WAKEFUL_SCRAPE_S)
                assert stand.reported.size == 0, stand.reported.message
            stand.gateway.gateway.requests.labels("/v1/completions", "404").inc()
            await stand.scrape_and_decide(WAKEFUL_SCRAPE_S)
            assert stand.reported.size == 0, "a refused request must not scale up"
            stand.gateway.gateway.held.set_function(lambda: 1)
            stand.gateway.gateway.in_flight.set(1)
            await stand.scrape_and_decide(WAKEFUL_SCRAPE_S)
            assert (stand.reported.size, stand.reported.reason) == (1, "RequestsHeld")
            assert [news.reason for news in stand.news] == ["Scaled", "Scaled"]
            for _ in range(60):
                await stand.scrape_and_decide(WAKEFUL_SCRAPE_S)
                assert stand.reported.size == 1, "a scale-down while the request is held"


async def test_the_autoscaler_runs_by_itself_and_stops_with_the_service() -> None:
    async with scraper() as (scraping, _):
        stand = Stand(scraping, TO_ZERO, replicas=0)
        async with serving(stand.gateway):
            due = asyncio.Queue[Key]()
            autoscaler = Autoscaler()
            autoscaler.observe(
                autoscaler.apply_sizes(resolved(decode=stand.spec), stored()),
                {"decode": ReportedGroup(role="decode", desired=0, pods=[])},
                [stand.gateway.object],
            )
            task = asyncio.create_task(autoscaler.run(scraping, due.put_nowait))
            try:
                await until(lambda: stand.gateway.num_scrapes >= 2, "two scrapes", 30)
                stand.gateway.gateway.held.set_function(lambda: 1)
                assert await asyncio.wait_for(due.get(), 30) == KEY
                assert (
                    autoscaler.apply_sizes(resolved(decode=stand.spec), stored()).replicas("decode")
                    == 1
                )
                autoscaler.forget(KEY)
                await asyncio.sleep(0)
                assert not task.done()
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)


def test_an_edit_of_replicas_is_ignored_with_a_warning() -> None:
    autoscaler = Autoscaler()

    def size(replicas: int, autoscaling: dict[str, Any] | None) -> int:
        spec = {"replicas": replicas, **({"autoscaling": autoscaling} if autoscaling else {})}
        return autoscaler.apply_sizes(resolved(decode=spec), stored()).replicas("decode")

    assert size(5, {**DECODE, "maxReplicas": 3}) == 3, "the size is not within the bounds"
    assert size(3, {**DECODE, "maxReplicas": 3}) == 3
    [news] = autoscaler.take_events(resolved())
    assert (news.reason, news.warning) == ("ReplicasIgnored", True)
    assert "stays at 3" in news.message
    assert size(1, {**DECODE, "maxReplicas": 3}) == 3
    assert size(1, None) == 1, "without autoscaling the size must be the spec's replicas"
    assert autoscaler.status(resolved(), "decode") is None


def test_a_new_service_of_the_same_name_has_no_history() -> None:
    autoscaler = Autoscaler()
    first = resolved(decode={"replicas": 4, "autoscaling": DECODE})
    assert autoscaler.apply_sizes(first, stored()).replicas("decode") == 4
    successor = msgspec.structs.replace(
        resolved(decode={"replicas": 2, "autoscaling": DECODE}), uid="uid-2"
    )
    assert autoscaler.apply_sizes(successor, stored()).replicas("decode") == 2


def test_running_changes_are_passed_to_the_policy() -> None:
    spec = {"autoscaling": DECODE, "parallelism": {"expert": True}}
    settings = settings_of(resolved(decode=spec).spec)

    def operation(**fields: Any) -> str:
        group = ReportedGroup(role="decode", desired=1, pods=[], **fields)
        return role_states(resolved(decode=spec), {"decode": group}, settings)["decode"].operation

    topology = {
        "coordinator": "10.0.0.1",
        "generation": 3,
        "ranks": [{"name": "demo-decode-0", "rank": 0, "phase": "serving"}],
    }

    def of_topology(reachable: bool = True, **more: Any) -> GroupTopology:
        return GroupTopology(
            status=msgspec.convert({**topology, **more}, TopologyStatus), reachable=reachable
        )

    scaling = {"id": "op-1", "kind": "scale", "phase": "preparing", "generation": 4, "seconds": {}}
    assert operation(topology=of_topology()) == ""
    assert operation(topology=of_topology(operation=scaling)) == "topology operation op-1 (scale)"
    assert operation(topology=of_topology(operation={**scaling, "phase": "done"})) == ""
    assert "coordinator" in operation(topology=of_topology(reachable=False))


def test_the_gateway_holds_requests_only_if_decode_may_scale_to_zero() -> None:
    assert gateway_config(resolved(decode={"autoscaling": DECODE})).hold_s == 0
    assert gateway_config(resolved(decode={"autoscaling": TO_ZERO})).hold_s == 300
    assert (
        gateway_config(resolved(decode={"autoscaling": {**TO_ZERO, "holdSeconds": 30}})).hold_s
        == 30
    )
