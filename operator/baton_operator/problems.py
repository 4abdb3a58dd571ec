"""What keeps a reconcile from its work, by the words of the condition `Ready`."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from baton_operator.api import Status
from baton_operator.apply import GatewayAPIMissing, NameConflict, ServiceKeyUnusable
from baton_operator.kube import KubeError
from baton_operator.report import Problem, condition_of, previous_conditions

INTERNAL_ERROR = "InternalError"
_NO_EVENT = ("Paused", "ReconcileError")
"""What was asked for, and what mostly is over before anybody looks."""
CONFLICTS = (NameConflict, GatewayAPIMissing, ServiceKeyUnusable)
"""Of the cluster with the spec: over when somebody else does something, which raises no event of ours."""


class InvalidSpec(Exception):  # noqa: N818 - the reason of the condition
    """The spec passed the schema of the CRD that is installed, but this operator cannot use it."""


class Paused(Exception):  # noqa: N818 - the reason of the condition
    """Nothing is to be done."""


def problem_of(error: Exception) -> Problem:
    """What to say of `error`, whatever it is."""
    match error:
        case InvalidSpec():
            return Problem("InvalidSpec", f"spec: {error}")
        case Paused() | NameConflict() | GatewayAPIMissing() | ServiceKeyUnusable():
            return Problem(type(error).__name__, str(error))
        case KubeError():
            return Problem("ReconcileError", str(error))
        case OSError():
            return Problem("ReconcileError", f"the API server did not answer: {error or type(error).__name__}")
    return Problem(
        INTERNAL_ERROR,
        f"a defect of the operator, please report it with the traceback in its log; {type(error).__name__}: {error}",
    )


def status_of_defect(service: dict[str, Any], error: Exception, now: datetime) -> Status:
    """What can be said where not even a status could be made of what was observed."""
    problem = problem_of(error)
    verdicts = {
        condition["type"]: ("Unknown", problem.reason, "the operator could not look at it")
        for condition in previous_conditions(service)
    }
    verdicts["Ready"] = ("False", problem.reason, problem.message)
    return Status(
        observed_generation=service["metadata"]["generation"],
        conditions=[condition_of(service, type_, verdict, now) for type_, verdict in verdicts.items()],
    )


def is_of_the_spec(error: Exception) -> bool:
    """Whether it came of the spec and not of what is around it; so does what nobody expected, for all that is known."""
    return not isinstance(error, (Paused, *CONFLICTS, KubeError, OSError))


def is_news(service: dict[str, Any], problem: Problem) -> bool:
    """Whether it is worth an Event: its reason is not that of `Ready` yet."""
    before = {condition["type"]: condition["reason"] for condition in previous_conditions(service)}
    return problem.reason not in (*_NO_EVENT, before.get("Ready"))


def is_failure(error: Exception) -> bool:
    """Whether the same step is to be tried again soon; else an edit is needed, or another object."""
    return not isinstance(error, (InvalidSpec, Paused, *CONFLICTS))
