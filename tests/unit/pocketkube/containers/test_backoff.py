"""The backoff between restarts of a container."""

from hypothesis import given
from hypothesis import strategies as st

from pocketkube.containers.backoff import BackoffPolicy


@given(runs=st.lists(st.floats(0, 200), max_size=30))
def test_the_backoff_stays_in_bounds_and_resets_after_a_long_run(runs: list[float]) -> None:
    policy = BackoffPolicy(base_s=1, cap_s=30, reset_after_s=60)
    delay = 0.0
    for ran in runs:
        after = policy.next_delay(delay, ran)
        assert 1 <= after <= 30
        assert after == 1 if ran >= 60 or delay == 0 else after == min(2 * delay, 30)
        delay = after
