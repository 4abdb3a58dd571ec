"""The autoscaler: scrapes the pods of services, and decides the sizes of their groups.

A reconcile reads the sizes with `apply_sizes`, and passes the observed state to `observe`. `run`
scrapes and decides. It queues a reconcile of a service whose sizes or status have changed.

The size is stored in the status of the service, so the size survives a restart of the operator.
Measurements and earlier decisions are lost in a restart. After a restart, no group shrinks until
recommendations cover a whole stabilization window.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec

from baton_operator import names
from baton_operator.api.spec_groups import AutoscalingStatus
from baton_operator.autoscale.decision_history import History
from baton_operator.autoscale.holds import RoleState
from baton_operator.autoscale.inputs import role_states, targets_of
from baton_operator.autoscale.policy import Decision, decide
from baton_operator.autoscale.scrape import Scraper, ScrapeTarget
from baton_operator.autoscale.settings import Settings, scrape_period_s, settings_of
from baton_operator.autoscale.windows import Snapshot, Window, window
from baton_operator.builders.resolved_service import ResolvedService
from baton_operator.kube.events import Event
from baton_operator.status.reasons import METRICS_MISSING
from baton_operator.status.report_group import ReportedGroup

logger = logging.getLogger(__name__)
TICK_S = 0.5  # interval of the check whether a scrape of any service is due
#: Minimum seconds between status writes if the size stays the same. The numbers in the message
#: change with every scrape.
PUBLISH_S = 60.0
#: Number of scrape periods without a reply after which a container counts as gone.
FRESH_PERIODS = 2.5


class _Role:
    """The autoscaling state of the prefill or decode group of one service."""

    def __init__(self, settings: Settings, status: AutoscalingStatus, now: float) -> None:
        self.settings = settings
        #: The last published decision. Its `size` is always the current one.
        self.status = status
        self.published_at = now
        self.history = History()


class _Service:
    """The autoscaling state of one service that has at least one group with `autoscaling`."""

    def __init__(self, uid: str, now: float) -> None:
        self.uid = uid
        self.roles: dict[names.MemberRole, _Role] = {}
        self.groups: dict[names.MemberRole, RoleState] = {}
        self.targets: list[ScrapeTarget] = []
        self.snapshots: list[Snapshot] = []
        self.errors: dict[str, str] = {}
        #: Events that the next reconcile writes.
        self.events: list[Event] = []
        self.next_at = now
        self.is_scraped = False

    @property
    def sizes(self) -> dict[names.MemberRole, int]:
        return {role: state.status.size for role, state in self.roles.items()}

    @property
    def period_s(self) -> float:
        return scrape_period_s(
            {role: state.settings for role, state in self.roles.items()}, self.sizes
        )


class Autoscaler:
    """Decides and stores the sizes of all prefill and decode groups that have `autoscaling`.

    Args:
        clock: monotonic clock in seconds, for measurements and decisions.
        wall_clock: returns the current time, for `lastScaleTime` in the status.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._clock = clock
        self._wall_clock = wall_clock
        self._services: dict[names.Key, _Service] = {}

    # Called by reconciles

    def apply_sizes(self, resolved: ResolvedService, service: dict[str, Any]) -> ResolvedService:
        """Return `resolved` with the decided sizes of the groups that have `autoscaling`.

        Args:
            service: the stored LLMService. Its status provides the sizes after a restart of the
                operator.
        """
        key, now = names.Key(resolved.namespace, resolved.name), self._clock()
        settings = settings_of(resolved.spec)
        if not settings:
            self.forget(key)
            return resolved
        known = self._services.get(key)
        if known is None or known.uid != resolved.uid:
            known = self._services[key] = _Service(resolved.uid, now)
        for role in names.MEMBER_ROLES:
            if role not in settings:
                known.roles.pop(role, None)
            elif role not in known.roles:
                known.roles[role] = _Role(
                    settings[role],
                    _stored_status(service, role, settings[role])
                    or _initial_status(role, settings[role]),
                    now,
                )
            elif known.roles[role].settings != settings[role]:
                self._change_settings(known, role, settings[role])
        return msgspec.structs.replace(resolved, sizes=known.sizes)

    def observe(
        self,
        resolved: ResolvedService,
        groups: Mapping[names.Role, ReportedGroup],
        pods: list[dict[str, Any]],
    ) -> None:
        """Store the groups and the scrape targets that the next scrape and decision use.

        Args:
            groups: the observed groups by role.
            pods: all pods of the service.
        """
        known = self._services.get(names.Key(resolved.namespace, resolved.name))
        if known is not None:
            settings = {role: state.settings for role, state in known.roles.items()}
            known.groups = role_states(resolved, groups, settings)
            known.targets = targets_of(resolved, pods)

    def status(self, resolved: ResolvedService, role: names.MemberRole) -> AutoscalingStatus | None:
        """Return the autoscaling status of a group; None if the group has no `autoscaling`."""
        known = self._services.get(names.Key(resolved.namespace, resolved.name))
        state = known.roles.get(role) if known is not None else None
        return None if state is None else state.status

    def take_events(self, resolved: ResolvedService) -> list[Event]:
        """Remove and return the stored autoscaling Events. The caller must write them."""
        known = self._services.get(names.Key(resolved.namespace, resolved.name))
        if known is None:
            return []
        events, known.events = known.events, []
        return events

    def forget(self, key: names.Key) -> None:
        """Drop the state of a service that is deleted or has no `autoscaling`."""
        self._services.pop(key, None)

    # Between reconciles

    async def run(self, scraper: Scraper, due: Callable[[names.Key], None]) -> None:
        """Scrape services and decide their sizes until cancelled.

        Args:
            due: called with each service that must be reconciled.
        """
        async with asyncio.TaskGroup() as group:
            while True:
                now = self._clock()
                for key, service in self._services.items():
                    if service.groups and service.next_at <= now and not service.is_scraped:
                        service.is_scraped = True
                        group.create_task(self._round(key, service, scraper, due))
                await asyncio.sleep(TICK_S)

    async def _round(
        self, key: names.Key, service: _Service, scraper: Scraper, due: Callable[[names.Key], None]
    ) -> None:
        try:
            if await self.scrape_and_decide(key, scraper):
                due(key)
        except Exception:  # an error in one service must not end the operator
            logger.exception("autoscaling of %s failed, retrying in %g s", key, service.period_s)
        finally:
            service.next_at = self._clock() + service.period_s
            service.is_scraped = False

    async def scrape_and_decide(self, key: names.Key, scraper: Scraper) -> bool:
        """Scrape a service and decide its sizes. Return whether the service must be reconciled."""
        now, service = self._clock(), self._services[key]
        scraped = await scraper.scrape(service.targets)
        if self._services.get(key) is not service or not service.roles:
            return False  # deleted during the scrape
        for pod, error in scraped.errors.items():
            if pod not in service.errors:
                logger.warning(
                    "autoscaling of %s: pod %s returned no metrics; without them the size of its "
                    "group may not change: %s",
                    key,
                    pod,
                    error,
                )
        service.errors = scraped.errors
        oldest = now - max(state.settings.behavior.window_s for state in service.roles.values())
        service.snapshots = [
            *(s for s in service.snapshots if s.at >= oldest),
            Snapshot(now, scraped.samples),
        ]
        # In a thread, because the time grows with the number of pods.
        measured = {
            role: await asyncio.to_thread(self._measure, service, state.settings, now)
            for role, state in [*service.roles.items()]
        }
        if self._services.get(key) is not service:
            return False  # deleted
        due = [
            self._decide(service, role, measured[role], now)
            for role in service.roles
            if role in measured
        ]
        return any(due)

    def _measure(self, service: _Service, settings: Settings, now: float) -> Window | None:
        return window(
            service.snapshots,
            start=now - settings.behavior.window_s,
            fresh_s=FRESH_PERIODS * service.period_s,
            quantile=settings.quantile,
        )

    def _decide(
        self, service: _Service, role: names.MemberRole, measured: Window | None, now: float
    ) -> bool:
        """Decide the size of one group. Return whether the service must be reconciled."""
        state, seen = service.roles[role], service.groups.get(role)
        if seen is None:
            return False
        settings = state.settings
        group = msgspec.structs.replace(seen, size=state.status.size)
        decision = decide(
            now,
            group,
            settings.bounds,
            settings.targets,
            measured,
            state.history,
            settings.behavior,
        )
        state.history = decision.history
        return self._publish(service, role, decision, now)

    def _publish(
        self, service: _Service, role: names.MemberRole, decision: Decision, now: float
    ) -> bool:
        state = service.roles[role]
        before = state.status
        resized = decision.size != before.size
        message = decision.explanation
        if decision.reason == METRICS_MISSING and service.errors:
            pod, error = min(service.errors.items())
            message = f"{message} Pod {pod}: {error}"
        status = AutoscalingStatus(
            size=decision.size,
            recommended=decision.recommended,
            reason=decision.reason,
            message=message,
            last_scale_time=self._wall_clock().strftime("%Y-%m-%dT%H:%M:%SZ")
            if resized
            else before.last_scale_time,
        )
        if status == before or not (resized or now - state.published_at >= PUBLISH_S):
            return False
        if resized:
            service.events.append(Event("Scaled", message))
        state.status, state.published_at = status, now
        return True

    def _change_settings(
        self, service: _Service, role: names.MemberRole, settings: Settings
    ) -> None:
        state = service.roles[role]
        if settings.replicas != state.settings.replicas:
            words = (
                f"spec.{role}.replicas is {settings.replicas}, but autoscaling sizes the group, "
                f"which stays at {state.status.size}; edit minReplicas and maxReplicas, or remove "
                "autoscaling"
            )
            service.events.append(Event("ReplicasIgnored", words, warning=True))
        state.settings, service.next_at = settings, self._clock()


def _stored_status(
    service: dict[str, Any], role: names.MemberRole, settings: Settings
) -> AutoscalingStatus | None:
    """Return the autoscaling status in `service`; None if it is missing or invalid.

    A size outside the bounds is replaced by the nearest size inside the bounds.
    """
    found = ((service.get("status") or {}).get(role) or {}).get("autoscaling")
    if not found:
        return None
    try:
        status = msgspec.convert(found, AutoscalingStatus)
    except msgspec.ValidationError:  # another version of the operator wrote it
        return None
    size = settings.bounds.nearest(status.size)
    if size == status.size:
        return status
    message = f"{role} {status.size} -> {size}: {status.size} is not within {settings.bounds}."
    return msgspec.structs.replace(status, size=size, reason="OutOfBounds", message=message)


def _initial_status(role: names.MemberRole, settings: Settings) -> AutoscalingStatus:
    size = settings.initial
    message = f"{role} starts with {size}: spec.{role}.replicas is {settings.replicas}."
    return AutoscalingStatus(size=size, recommended=size, reason="Initial", message=message)
