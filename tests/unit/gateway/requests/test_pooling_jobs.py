"""Jobs of pooling models: repeated queries, and the number of sequences."""

from __future__ import annotations

import pytest

from baton_gateway.requests import pooling_jobs
from baton_protocol.pooling_params import Task
from support.gateway.gateway_rig import MakeRig
from support.gateway.pooling_rig import start


async def test_a_query_that_is_repeated_too_often_is_refused(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pooling_jobs, "MAX_PAIR_CHARACTERS", 100)
    rig = await start(make_rig, Task.CLASSIFY)
    query = "q" * 30
    for number, status in ((3, 200), (4, 400)):
        request = {"query": query, "documents": ["a"] * number}
        got, body, _ = await rig.post("/v1/rerank", request)
        assert got == status
    assert body["error"]["code"] == "request_too_large"


async def test_texts_count_as_sequences(make_rig: MakeRig) -> None:
    rig = await start(make_rig, Task.CLASSIFY, max_concurrent_requests=3)
    for number, expected in ((2, 200), (4, 400)):
        request = {"query": "go", "documents": ["a", "b", "c", "d"][:number]}
        assert (await rig.post("/v1/rerank", request))[0] == expected
