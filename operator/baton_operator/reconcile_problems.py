"""Problems of a reconcile, as reasons and messages of the condition `Ready`."""

from __future__ import annotations

from baton_kube.client import KubeError, error_text


class Problem(Exception):  # noqa: N818 - the reason of the condition
    """A problem of a reconcile.

    The name of its class is the reason of `Ready`, and its text is the message.
    """

    #: Retried with backoff. Otherwise a user must edit the spec or another object.
    is_retried = False
    #: The spec is the cause, so the recorded spec may still work.
    is_of_spec = False
    #: A change in the cluster that no watch shows can solve it.
    is_conflict = False
    #: A Warning Event reports it.
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
    """The service is paused, and no spec was rolled out before."""

    has_event = False


class NameConflict(Problem):
    """An object with a name that the service needs has another owner."""

    is_conflict = True

    def __init__(self, kind: str, name: str) -> None:
        what = f"{kind} {name} exists and is not controlled by this LLMService"
        super().__init__(f"{what}; delete it, or rename the service")


class GatewayAPIMissing(Problem):
    """The spec has an HTTPRoute, and the cluster has no Gateway API."""

    is_conflict = True

    def __init__(self) -> None:
        what = "the cluster has no gateway.networking.k8s.io/v1"
        super().__init__(
            f"spec.gateway.httpRoute: {what}; install the Gateway API, or use spec.gateway.ingress"
        )


class ServiceKeyUnusable(Problem):
    """The Secret of the service holds no usable key."""

    is_conflict = True

    def __init__(self, name: str, why: object) -> None:
        super().__init__(f"Secret {name}: {why}; delete it, and the operator creates another key")


class ReconcileError(Problem):
    """The API server refused a request or did not answer. A retry usually succeeds."""

    is_retried = True
    has_event = False


class InternalError(Problem):
    """A defect of the operator. The spec may have triggered it."""

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
        problem = ReconcileError(f"the API server did not answer: {error_text(error)}")
    else:
        what = "the operator has a defect, please report it with the traceback in its log"
        problem = InternalError(f"{what}: {type(error).__name__}: {error}")
    problem.__cause__ = error
    return problem
