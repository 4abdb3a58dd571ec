"""Groups with pods, as the status reports them.

For the tests of the status.
"""

from __future__ import annotations

from baton_kube.client import Object
from baton_operator.api.spec_groups import AutoscalingStatus
from baton_operator.status.report_group import ReportedGroup
from baton_protocol.process.health import Health
from support.operator.autoscale_pods import FakePod

FATAL = {
    "exitCode": 78,
    "message": "loading weights\nFATAL ModelNotFound: /models/x does not exist",
}
BACK_OFF = {"waiting": {"reason": "CrashLoopBackOff"}}
QUOTA = 'pods "demo-gateway-x" is forbidden: exceeded quota: gpus'


def decode(pods: list[Object], desired: int = 1, **suspended: str) -> ReportedGroup:
    """Return a decode group.

    Args:
        suspended: reasons in the replies of paused and sleeping engines, by the pod's letter.
    """
    replies = {f"demo-decode-{letter}": Health(reply, "m") for letter, reply in suspended.items()}
    return ReportedGroup(
        role="decode", desired=desired, pods=pods, revision="new", suspended=replies
    )


def gateway(pods: list[Object]) -> ReportedGroup:
    return ReportedGroup(role="gateway", desired=1, pods=pods, revision="new")


def prefill(pods: list[Object]) -> ReportedGroup:
    return ReportedGroup(role="prefill", desired=1, pods=pods, revision="new")


def sized_group(reason: str, *, desired: int = 1) -> ReportedGroup:
    status = AutoscalingStatus(
        size=desired, recommended=desired, reason=reason, message=f"because of {reason}."
    )
    engines = [FakePod(f"demo-decode-{number}", "decode").object for number in range(1)]
    return ReportedGroup(
        role="decode", desired=desired, pods=engines if desired else [], autoscaling=status
    )
