"""One client cannot use all entries of long options."""

from __future__ import annotations

import pytest

from baton_gateway.access.admission import MAX_TOTAL_OPTION_ENTRIES, Admission
from baton_gateway.errors import APIError
from baton_gateway.metrics import GatewayMetrics
from baton_text.requests.generation_request import MAX_OPTION_ENTRIES


def test_a_client_leaves_long_options_to_others() -> None:
    admission = Admission(100, GatewayMetrics())
    with admission.reserve("greedy") as first, admission.reserve("greedy") as second:
        first.resize(16, MAX_OPTION_ENTRIES - 10)
        second.resize(1, 10)
        with pytest.raises(APIError, match="long options") as refused:
            second.resize(1, 11)
        assert refused.value.status == 429
        second.resize(1)  # other requests of the client are served
        with admission.reserve("honest") as third:
            third.resize(1, MAX_OPTION_ENTRIES)
    with admission.reserve("greedy") as again:
        again.resize(1, MAX_OPTION_ENTRIES)


def test_clients_without_keys_share_the_entries_of_all() -> None:
    admission = Admission(100, GatewayMetrics())
    with admission.reserve(None) as first, admission.reserve(None) as second:
        first.resize(1, MAX_TOTAL_OPTION_ENTRIES)
        with pytest.raises(APIError, match="long options"):
            second.resize(1, 1)
