"""Errors of a reconcile that the condition `Ready` reports."""

from __future__ import annotations

from baton_kube.client import KubeError, error_text


class Problem(Exception):  # noqa: N818 - the reason of the condition
    """Base class of the errors that the condition `Ready` reports.

    The class name is the condition's reason, and the text is the condition's message.
    """

    #: Whether the reconcile is retried with backoff. If False, a user must edit the spec or another
    #: object.
    is_retried = False
    #: Whether the spec may be the cause, so that an earlier spec may work.
    is_of_spec = False
    #: Whether a change that causes no watch event can solve the problem.
    is_conflict = False
    #: Whether a Warning Event reports the problem.
    has_event = True

    @property
    def reason(self) -> str:
        return type(self).__name__


class InvalidSpec(Problem):
    """The operator rejects the spec, although the API server accepted it."""

    is_of_spec = True

    def __init__(self, why: object) -> None:
        super().__init__(f"spec: {why}")


class Paused(Problem):
    """The service is paused before any spec was rolled out."""

    has_event = False


class NameConflict(Problem):
    """The service needs an object whose name is taken by an object of another owner."""

    is_conflict = True

    def __init__(self, kind: str, name: str) -> None:
        what = f"{kind} {name} exists and is not controlled by this LLMService"
        super().__init__(f"{what}; delete it, or rename the service")


class GatewayAPIMissing(Problem):
    """The spec has an HTTPRoute, but the cluster has no Gateway API."""

    is_conflict = True

    def __init__(self) -> None:
        what = "the cluster has no gateway.networking.k8s.io/v1"
        super().__init__(
            f"spec.gateway.httpRoute: {what}; install the Gateway API, or use spec.gateway.ingress"
        )


class ServiceKeyUnusable(Problem):
    """The Secret for the service key contains no valid key."""

    is_conflict = True

    def __init__(self, name: str, why: object) -> None:
        super().__init__(f"Secret {name}: {why}; delete it, and the operator creates another key")


class ReconcileError(Problem):
    """The API server refused a request or did not respond. A retry usually succeeds."""

    is_retried = True
    has_event = False


class InternalError(Problem):
    """The operator has a defect, possibly one that only the service's spec triggers."""

    is_retried = True
    is_of_spec = True


def problem_of(error: Exception) -> Problem:
    """Return `error` as a Problem whose `__cause__` is `error`. A Problem is returned unchanged."""
    if isinstance(error, Problem):
        return error
    problem: Problem
    if isinstance(error, KubeError):
        problem = ReconcileError(f"the API server refused a request, which is retried: {error}")
    elif isinstance(error, OSError):
        what = "the API server did not answer a request, which is retried"
        problem = ReconcileError(f"{what}: {error_text(error)}")
    else:
        what = "the operator has a defect, please report it with the traceback in its log"
        problem = InternalError(f"{what}: {type(error).__name__}: {error}")
    problem.__cause__ = error
    return problem


def drop_tracebacks(error: BaseException) -> None:
    """Remove the tracebacks of an error and of its causes.

    The frames of a traceback refer to all objects that a reconcile has read, and often to the error
    itself. Without this call, only a garbage collection would free them.
    """
    errors = [error]
    for each in errors:  # the list grows
        each.__traceback__ = None
        for other in (each.__cause__, each.__context__):
            if other is not None and not any(other is known for known in errors):
                errors.append(other)
