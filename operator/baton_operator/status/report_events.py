"""Compute the Events about changes of the status. Pure.

The Events of the autoscaler, `Scaled` and `ReplicasIgnored`, come from `Autoscaler.take_events`.
"""

from __future__ import annotations

from baton_kube.client import Object
from baton_operator.api.llmservice import Condition, Status
from baton_operator.kube.events import Event
from baton_operator.observe.observation import condition, conditions
from baton_operator.plan.topology_view import recorded_topology
from baton_operator.reconcile_errors import Problem
from baton_operator.status.reasons import Failure, Progress, Settled
from baton_operator.status.report_model import MODEL_AVAILABLE
from baton_operator.status.report_topology import operation_events


def new_events(service: Object, status: Status, problem: Problem | None) -> list[Event]:
    """Return the Events about new problems, failures and topology operations in `status`.

    Args:
        service: the LLMService with its previous status.
        problem: the first error of this reconcile; None without an error.
    """
    events = []
    is_known = problem and condition(service, "Ready").get("reason") == problem.reason
    if problem and problem.has_event and not is_known:
        events.append(Event(problem.reason, str(problem), warning=True))
    events += [
        Event(failure.reason, failure.message, warning=True)
        for failure in new_failures(service, status)
    ]
    topology = status.decode.topology if status.decode else None
    if topology is not None:
        events += operation_events(recorded_topology(service, topology.coordinator), topology)
    return events


def new_failures(service: Object, status: Status) -> list[Condition]:
    """Return the conditions in `status` whose failure is not in the previous status."""
    before = {
        (each["type"], each["status"], each["reason"]) for each in conditions(service).values()
    }
    # These conditions summarize others. Topology operations have their own Events.
    summaries = ("Ready", "Available", "Scaling", MODEL_AVAILABLE)
    return [
        each
        for each in status.conditions or []
        if each.status == "False"
        and each.type not in summaries
        and each.reason not in {*Progress, *Settled, Failure.SCALE_FAILED}
        and (each.type, each.status, each.reason) not in before
    ]
