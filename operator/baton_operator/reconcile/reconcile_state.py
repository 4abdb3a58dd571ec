"""The state of one reconcile: the observed state, the results of its steps, and its outcome.

Nothing here is kept for the next reconcile.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime

from baton_operator.builders.resolved_service import ResolvedService
from baton_operator.observe.observation import Observation
from baton_operator.reconcile.controller import Outcome
from baton_operator.reconcile.desired import Desired
from baton_operator.reconcile_errors import (
    InternalError,
    Problem,
    drop_tracebacks,
    problem_of,
)
from baton_operator.status.status_probes import is_progress_expected

#: Seconds between reconciles while another owner's object or a missing API blocks the service
#: (`Problem.is_conflict`).
CONFLICT_REVISIT_S = 5.0
#: Seconds between reconciles while a service is not Ready. Its deadlines pass without an event.
UNSETTLED_REVISIT_S = 20.0
#: Seconds between reconciles while pods report loading progress. No watch event carries it.
LOADING_REVISIT_S = 3.0


@dataclass(eq=False)
class ReconcileState:
    """The state of one reconcile: its observation, and the results of its steps so far."""

    observed: Observation
    now: datetime
    #: Name of the ControllerRevision with the spec that is rolled out.
    spec_revision: str | None
    #: The resolved service for the status. None: no spec could be resolved.
    resolved: ResolvedService | None = None
    #: The desired state. None: no spec could be used.
    desired: Desired | None = None
    #: Hash of the desired objects, of the objects that must not exist, and of the names of previous
    #: ConfigMaps that pods mount. Member pods are left out.
    objects_hash: str = ""
    #: Whether all objects except member pods are as desired. An HTTPRoute is ignored if the cluster
    #: has no Gateway API.
    objects_match: bool = False
    #: Problems in the order of their occurrence. The first one decides `Ready`.
    problems: list[Problem] = field(default_factory=list)
    is_ready: bool = False
    #: Names of the ConfigMaps that members of the previous revision need.
    restored_config_maps: set[str] = field(default_factory=set)
    #: Intervals after which to reconcile again, in seconds.
    revisits: list[float] = field(default_factory=list)

    def add_problem(self, error: Exception) -> None:
        """Add the error to `problems`, unless it is there already.

        The error's traceback is dropped, except for a defect of the operator: the controller logs
        the traceback of a defect.
        """
        problem = problem_of(error)
        if not isinstance(problem, InternalError):
            drop_tracebacks(problem)
        if problem not in self.problems:
            self.problems.append(problem)

    def outcome(self) -> Outcome:
        """Return the outcome of the reconcile, with the seconds until the next one.

        Raises:
            Exception: the cause of the last problem that must be retried, if there is one.
        """
        for problem in reversed(self.problems):
            if problem.is_retried:
                raise problem.__cause__ or problem
        revisits = self.revisits
        if any(problem.is_conflict for problem in self.problems):
            revisits = revisits or [CONFLICT_REVISIT_S]
        if not self.is_ready:
            is_loading = is_progress_expected(self.observed.pods, self.observed.loading)
            revisits = [*revisits, LOADING_REVISIT_S if is_loading else UNSETTLED_REVISIT_S]
        return Outcome(min(revisits, default=None))
