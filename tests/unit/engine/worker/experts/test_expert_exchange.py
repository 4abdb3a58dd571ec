"""The plan of an exchange of experts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_engine.worker.experts.expert_exchange import plan_transfers, wanted_by
from baton_engine.worker.experts.expert_weights import ExpertKey
from baton_protocol.topology import Placement

pytestmark = pytest.mark.usefixtures("one_thread")


placements = st.integers(1, 5).flatmap(
    lambda ranks: st.lists(
        st.lists(
            st.lists(st.integers(0, 5), min_size=2, max_size=4), min_size=ranks, max_size=ranks
        ),
        min_size=1,
        max_size=3,
    )
)


@given(placement=placements, data=st.data())
def test_the_plan_sends_each_rank_the_experts_it_lacks_from_a_rank_that_holds_them(
    placement: Placement, data: st.DataObject
) -> None:
    num_ranks = len(placement[0])
    keys = st.sets(st.builds(ExpertKey, st.integers(0, len(placement) - 1), st.integers(0, 5)))
    held = [data.draw(keys) for _ in range(num_ranks)]
    transfers = plan_transfers(held, placement)
    assert [transfer.key.layer for transfer in transfers] == sorted(
        transfer.key.layer for transfer in transfers
    )
    for key, source, target in transfers:
        assert key in held[source]
        assert key not in held[target]
    anywhere = set().union(*held)
    for rank in range(num_ranks):
        got = [transfer.key for transfer in transfers if transfer.target == rank]
        assert len(got) == len(set(got))
        assert set(got) == (wanted_by(placement, rank) - held[rank]) & anywhere
