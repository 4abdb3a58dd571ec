"""The convergence machine, longer, with another seed each time."""

from __future__ import annotations

import os
import secrets

import hypothesis
import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from support.operator.simulation.convergence_machine import Machine

EXAMPLES, STEPS = 150, 30


@pytest.mark.chaos
@pytest.mark.timeout(3600)
def test_services_converge_after_any_events() -> None:
    seed = int(os.environ.get("BATON_SEED") or secrets.randbits(32))
    print(f"BATON_SEED={seed}")
    # Without shrinking, a failure is reported at once, with its seed.
    how = settings(
        max_examples=EXAMPLES,
        stateful_step_count=STEPS,
        deadline=None,
        phases=[Phase.generate],
        database=None,
    )
    run_state_machine_as_test(hypothesis.seed(seed)(Machine), settings=how)
