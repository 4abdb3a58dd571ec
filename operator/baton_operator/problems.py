"""What keeps a reconcile from its work, in the words of the condition `Ready`."""

from __future__ import annotations

from baton_kube.client import KubeError


class Problem(Exception):  # noqa: N818 - the reason of the condition
    """Its class name is the condition's reason, its text the message."""

    #: Whether the step is tried again soon. If not, it takes an edit, or a change of another object.
    is_retried = False
    #: Whether the spec is the cause, so that the one rolled out before can still be kept up.
    is_of_spec = False
    #: Whether it ends when somebody changes the cluster, of which no watch tells.
    is_conflict = False

    @property
    def reason(self) -> str:
        return type(self).__name__


class InvalidSpec(Problem):
    """The spec passed the installed CRD's schema, but this operator cannot use it."""

    is_of_spec = True

    def __init__(self, why: object) -> None:
        super().__init__(f"spec: {why}")


class Paused(Problem):
    """Nothing is to be done."""


class NameConflict(Problem):
    """An object with a name that the service needs belongs to somebody else."""

    is_conflict = True

    def __init__(self, kind: str, name: str) -> None:
        super().__init__(
            f"{kind} {name} exists and is not controlled by this LLMService; delete it, or rename the service"
        )


class GatewayAPIMissing(Problem):
    """The spec asks for a route, and the API server has no routes."""

    is_conflict = True

    def __init__(self) -> None:
        super().__init__(
            "spec.gateway.httpRoute: the cluster has no gateway.networking.k8s.io/v1; install the Gateway API, or use "
            "spec.gateway.ingress"
        )


class ServiceKeyUnusable(Problem):
    """The Secret with the service's key holds none."""

    is_conflict = True

    def __init__(self, name: str, why: object) -> None:
        super().__init__(f"Secret {name}: {why}; delete it, and another key is drawn")


class ReconcileError(Problem):
    """The API server refused or did not answer. Mostly over before anybody looks."""

    is_retried = True


class InternalError(Problem):
    """A defect of the operator. The spec may be the cause, for all that is known."""

    is_retried = True
    is_of_spec = True


def problem_of(error: Exception) -> Problem:
    """Return `error` as a problem, with the error as its cause."""
    if isinstance(error, Problem):
        return error
    problem: Problem
    match error:
        case KubeError():
            problem = ReconcileError(str(error))
        case OSError():
            problem = ReconcileError(f"the API server did not answer: {error or type(error).__name__}")
        case _:
            problem = InternalError(
                "a defect of the operator, please report it with the traceback in its log; "
                f"{type(error).__name__}: {error}"
            )
    problem.__cause__ = error
    return problem


def is_news(reason_before: str | None, problem: Problem) -> bool:
    """Whether the problem is worth an Event. `reason_before`: of the condition Ready as it was written last."""
    return not isinstance(problem, (Paused, ReconcileError)) and problem.reason != reason_before
