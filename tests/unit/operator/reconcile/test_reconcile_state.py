"""The state of one reconcile."""

from __future__ import annotations

import gc
import weakref
from datetime import UTC, datetime
from typing import Any

import pytest

from baton_kube.client import KubeError
from baton_operator.reconcile.reconcile_state import ReconcileState
from baton_operator.reconcile_errors import InvalidSpec


class Observed:
    """Stands for the objects that a reconcile has read."""


@pytest.mark.parametrize("error", [InvalidSpec("wrong"), KubeError(500, "", "refused")])
def test_a_problem_does_not_keep_the_objects_that_were_read(error: Exception) -> None:
    observed: Any = Observed()
    state = ReconcileState(observed, datetime.now(UTC), None)
    reference = weakref.ref(observed)

    def step(state: ReconcileState) -> None:
        try:
            raise error
        except Exception as caught:
            state.add_problem(caught)

    gc.disable()
    try:
        step(state)
        assert state.problems
        del state, observed
        assert reference() is None
    finally:
        gc.enable()
