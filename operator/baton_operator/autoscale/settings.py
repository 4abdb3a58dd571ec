"""Convert `spec.<role>.autoscaling` to the targets, bounds and behavior of each group. Pure."""

from __future__ import annotations

from math import inf

import msgspec

from baton_operator.api.llmservice import Spec
from baton_operator.api.spec_groups import AutoscalingBounds
from baton_operator.autoscale.policy import Behavior, Bounds
from baton_operator.autoscale.recommendations import Targets
from baton_operator.names import MemberRole

SCRAPE_S = 15.0  # longest interval between two scrapes, in seconds
#: Seconds between two scrapes while a role has no engines. The gateway may hold a request until
#: the next scrape shows it and an engine is started.
WAKEFUL_SCRAPE_S = 2.0


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The autoscaling settings of the prefill or decode group."""

    bounds: Bounds
    targets: Targets
    behavior: Behavior
    #: The quantile of latencies that is compared with the targets, 0 to 1.
    quantile: float
    #: `spec.<role>.replicas`.
    replicas: int

    @property
    def initial(self) -> int:
        """The size of the group before the first decision."""
        return self.bounds.nearest(self.replicas)


def settings_of(spec: Spec) -> dict[MemberRole, Settings]:
    """Return the settings of each role that has `autoscaling`."""
    found: dict[MemberRole, Settings] = {}
    if spec.prefill is not None and (prefill := spec.prefill.autoscaling) is not None:
        targets = Targets(
            ttft_s=prefill.ttft_milliseconds / 1000, itl_s=inf, busy=prefill.busy_percent / 100
        )
        found["prefill"] = _settings(prefill, targets, spec.prefill.replicas)
    if (decode := spec.decode.autoscaling) is not None:
        ttft_s = inf if decode.ttft_milliseconds is None else decode.ttft_milliseconds / 1000
        targets = Targets(
            ttft_s=ttft_s,
            itl_s=decode.itl_milliseconds / 1000,
            kv_usage=decode.kv_usage_percent / 100,
        )
        found["decode"] = _settings(decode, targets, spec.decode.replicas)
    return found


def _settings(autoscaling: AutoscalingBounds, targets: Targets, replicas: int) -> Settings:
    behavior = Behavior(
        tolerance=autoscaling.tolerance_percent / 100,
        up_window_s=float(autoscaling.scale_up_stabilization_seconds),
        down_window_s=float(autoscaling.scale_down_stabilization_seconds),
        # Unset: minReplicas is not 0, so the group is never scaled to zero.
        idle_s=inf if autoscaling.idle_seconds is None else float(autoscaling.idle_seconds),
    )
    return Settings(
        bounds=Bounds(autoscaling.min_replicas, autoscaling.max_replicas),
        targets=targets,
        behavior=behavior,
        quantile=autoscaling.percentile / 100,
        replicas=replicas,
    )


def scrape_period_s(settings: dict[MemberRole, Settings], sizes: dict[MemberRole, int]) -> float:
    """Return the interval between scrapes of a service, in seconds.

    The interval is WAKEFUL_SCRAPE_S while a role has no engines. Otherwise it is a quarter of the
    shortest `idleSeconds` of a role with `minReplicas: 0`, but at least WAKEFUL_SCRAPE_S and at
    most SCRAPE_S.
    """
    if any(sizes.get(role) == 0 for role in settings):
        return WAKEFUL_SCRAPE_S
    idle_s = min(
        (each.behavior.idle_s for each in settings.values() if each.bounds.min == 0), default=inf
    )
    return min(SCRAPE_S, max(WAKEFUL_SCRAPE_S, idle_s / 4))
