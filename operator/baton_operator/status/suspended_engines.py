"""Engines that are asleep or paused: they admit no requests although nothing has failed. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from baton_kube.client import Object
from baton_operator.status.diagnose import Diagnosis, pods_text
from baton_operator.status.reasons import Progress
from baton_protocol.options.config import ENGINE_HTTP_PORT
from baton_protocol.process.health import Health


class Suspension(NamedTuple):
    """The state of an engine that was paused or put to sleep, and how to resume the engine."""

    reason: Progress
    state: str
    remedy: str


#: Suspensions by the reason in the engine's reply to `GET /ready`.
SUSPENSIONS = {
    "Asleep": Suspension(Progress.ENGINE_ASLEEP, "asleep", "wake up with POST /wake_up"),
    "Paused": Suspension(Progress.ENGINE_PAUSED, "paused", "resume with POST /resume"),
}


def diagnose_suspended(pods: list[Object], replies: Mapping[str, Health]) -> Diagnosis | None:
    """Return which engines are asleep or paused, and how to resume them.

    Args:
        replies: replies to `GET /ready` of the engines that are asleep or paused, by pod name.

    Returns:
        None if no engine in `pods` is asleep or paused.
    """
    found = []
    for reply, (reason, state, remedy) in SUSPENSIONS.items():
        names = {name for name, health in replies.items() if health.reason == reply}
        if suspended := [pod for pod in pods if pod["metadata"]["name"] in names]:
            verb = "are" if len(suspended) > 1 else "is"
            hint = f"{remedy} on port {ENGINE_HTTP_PORT}, with the service's token"
            text = f"{pods_text(suspended)} {verb} {state}; {hint}"
            found.append(Diagnosis(reason, text))
    if not found:
        return None
    return Diagnosis(found[0].reason, "; ".join(each.message for each in found))
