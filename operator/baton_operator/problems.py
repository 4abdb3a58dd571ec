"""What keeps a reconcile from its work, in the words of the condition `Ready`."""

from __future__ import annotations

from baton_kube.client import KubeError


class Problem(Exception):  # noqa: N818 - the reason of the condition
    """Its class name is the condition's reason, its text the message."""

    is_retried = False  # soon. If not, it takes an edit, or a change of another object
    is_of_spec = False  # the spec is the cause, so the one rolled out before can still be kept up
    is_conflict = False  # it ends when somebody changes the cluster, of which no watch tells
    has_event = True

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

    has_event = False


class NameConflict(Problem):
    """An object with a name that the service needs belongs to somebody else."""

    is_conflict = True

    def __init__(self, kind: str, name: str) -> None:
        what = f"{kind} {name} exists and is not controlled by this LLMService"
        super().__init__(f"{what}; delete it, or rename the service")


class GatewayAPIMissing(Problem):
    """The spec asks for a route, and the API server has no routes."""

    is_conflict = True

    def __init__(self) -> None:
        what = "the cluster has no gateway.networking.k8s.io/v1"
        super().__init__(f"spec.gateway.httpRoute: {what}; install the Gateway API, or use spec.gateway.ingress")


class ServiceKeyUnusable(Problem):
    """The Secret with the service's key holds none."""

    is_conflict = True

    def __init__(self, name: str, why: object) -> None:
        super().__init__(f"Secret {name}: {why}; delete it, and another key is drawn")


class ReconcileError(Problem):
    """The API server refused or did not answer. Mostly over before anybody looks."""

    is_retried = True
    has_event = False


class InternalError(Problem):
    """A defect of the operator. The spec may be the cause, for all that is known."""

    is_retried = True
    is_of_spec = True


def problem_of(error: Exception) -> Problem:
    """Return `error` as a problem, with the error as its cause."""
    if isinstance(error, Problem):
        return error
    problem: Problem
    if isinstance(error, KubeError):
        problem = ReconcileError(str(error))
    elif isinstance(error, OSError):
        problem = ReconcileError(f"the API server did not answer: {str(error) or type(error).__name__}")
    else:
        what = "a defect of the operator, please report it with the traceback in its log"
        problem = InternalError(f"{what}; {type(error).__name__}: {error}")
    problem.__cause__ = error
    return problem
