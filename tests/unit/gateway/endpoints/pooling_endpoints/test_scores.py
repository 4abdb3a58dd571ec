"""`/v1/score` and `/v1/rerank` over scripted engines: pairs, order, both kinds of models."""

from __future__ import annotations

import math
from typing import Any

import pytest

from baton_protocol.pooling_params import PairFormat, Task
from baton_text.score_prompts import encode_pair
from baton_text.tokenizer import Tokenizer, TokenizerError
from support.gateway.fake_engine import vector_of
from support.gateway.gateway_rig import GatewayRig, MakeRig
from support.gateway.pooling_rig import start

DOCUMENTS = ["a", "hello world", "go on and on"]


@pytest.fixture
async def reranker(make_rig: MakeRig) -> GatewayRig:
    return await start(make_rig, Task.CLASSIFY)


def pair_scores(rig: GatewayRig, query: str) -> list[float]:
    """Return the scores of the scripted classifier, which grow with the length of the prompt."""
    prompts = [
        encode_pair(rig.tokenizer, PairFormat.QWEN3_RERANKER, query, document).token_ids
        for document in DOCUMENTS
    ]
    return [len(prompt) / 1000 for prompt in prompts]


def cosines(rig: GatewayRig, query: str) -> list[float]:
    def unit(text: str) -> list[float]:
        vector = vector_of(rig.tokenizer.encode(text))
        return [value / math.hypot(*vector) for value in vector]

    return [sum(a * b for a, b in zip(unit(query), unit(each), strict=True)) for each in DOCUMENTS]


async def test_a_classifier_scores_pairs_in_order(reranker: GatewayRig) -> None:
    status, body, _ = await reranker.post("/v1/score", {"text_1": "go", "text_2": DOCUMENTS})
    assert status == 200
    scores = [item["score"] for item in body["data"]]
    assert scores == pytest.approx(pair_scores(reranker, "go"), abs=1e-6)
    assert [item["index"] for item in body["data"]] == [0, 1, 2]
    assert body["object"] == "list"
    assert body["usage"]["prompt_tokens"] == sum(
        len(add.prompt_token_ids) for add in reranker.engines[0].adds
    )


async def test_a_long_text_for_which_the_tokenizer_fails_is_refused(
    reranker: GatewayRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> list[int]:
        raise TokenizerError("it panicked")

    monkeypatch.setattr(Tokenizer, "fewest_tokens", lambda *_: 0)
    monkeypatch.setattr(Tokenizer, "encode", fail)
    status, body, _ = await reranker.post("/v1/score", {"text_1": "go", "text_2": "x" * 10_000})
    assert (status, body["error"]["param"]) == (400, "text_2")


async def test_a_pair_with_text_types_names_the_second_text(make_rig: MakeRig) -> None:
    rig = make_rig()
    engine = rig.engine("d", "decode")
    engine.pool(Task.CLASSIFY, PairFormat.TOKENIZER)
    await rig.start(engine)
    status, _, _ = await rig.post("/v1/score", {"text_1": "go", "text_2": "hello world"})
    assert status == 200
    expected = encode_pair(rig.tokenizer, PairFormat.TOKENIZER, "go", "hello world")
    [add] = engine.adds
    assert add.pooling_params is not None
    assert (add.prompt_token_ids, add.pooling_params.second_text_start) == expected


async def test_an_embedding_model_scores_by_cosine_and_embeds_each_text_once(
    make_rig: MakeRig,
) -> None:
    rig = await start(make_rig, Task.EMBED)
    status, body, _ = await rig.post("/v1/score", {"text_1": "go", "text_2": [*DOCUMENTS, "go"]})
    assert status == 200
    scores = [item["score"] for item in body["data"]]
    assert scores == pytest.approx([*cosines(rig, "go"), 1.0], abs=1e-6)
    assert len(rig.engines[0].adds) == 4


@pytest.mark.parametrize("task", [Task.EMBED, Task.CLASSIFY])
async def test_rerank_returns_the_best_documents_first(make_rig: MakeRig, task: Task) -> None:
    rig = await start(make_rig, task)
    given: list[Any] = [DOCUMENTS[0], {"text": DOCUMENTS[1]}, DOCUMENTS[2]]
    expected = (cosines if task is Task.EMBED else pair_scores)(rig, "go")
    order = sorted(range(3), key=lambda index: -expected[index])
    status, body, _ = await rig.post("/v1/rerank", {"query": "go", "documents": given})
    assert status == 200
    assert [item["index"] for item in body["results"]] == order
    for item in body["results"]:
        assert item["relevance_score"] == pytest.approx(expected[item["index"]], abs=1e-6)
        assert item["document"] == {"text": DOCUMENTS[item["index"]]}
    request = {"query": "go", "documents": given, "top_n": 2, "return_documents": False}
    status, body, _ = await rig.post("/v1/rerank", request)
    assert status == 200
    assert [item["index"] for item in body["results"]] == order[:2]
    assert all("document" not in item for item in body["results"])


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/score", {"text_1": "a"}, "text_2"),
        ("/v1/score", {"text_1": "a", "text_2": []}, "text_2"),
        ("/v1/score", {"text_1": [], "text_2": []}, "text_2"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1"),
        ("/v1/score", {"text_1": ["a", 5], "text_2": ["c", "d"]}, "text_1[1]"),
        ("/v1/score", {"text_1": "a", "text_2": "b " * 1100}, "text_2"),
        ("/v1/rerank", {"documents": ["a"]}, "query"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": [{"title": "b"}]}, "documents[0].text"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": 0}, "top_n"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "priority": -1}, "priority"),
        ("/v1/rerank", {"query": "hello world " * 9000, "documents": ["b"]}, "query"),
    ],
)
async def test_invalid_fields_get_400_with_their_name(
    reranker: GatewayRig, path: str, fields: dict[str, Any], param: str
) -> None:
    status, body, _ = await reranker.post(path, fields)
    assert (status, body["error"]["param"]) == (400, param), body


@pytest.mark.parametrize("path", ["/v1/score", "/v1/rerank", "/v1/embeddings", "/v1/completions"])
async def test_a_model_serves_only_the_endpoints_of_its_task(make_rig: MakeRig, path: str) -> None:
    fields = {
        "text_1": "a",
        "text_2": "b",
        "query": "a",
        "documents": ["b"],
        "input": "a",
        "prompt": "a",
    }
    served = {
        Task.GENERATE: {"/v1/completions"},
        Task.EMBED: {"/v1/score", "/v1/rerank", "/v1/embeddings"},
        Task.CLASSIFY: {"/v1/score", "/v1/rerank"},
    }
    for task, paths in served.items():
        rig = await start(make_rig, task)
        status, body, _ = await rig.post(path, fields)
        if path in paths:
            assert status == 200
        else:
            assert (status, body["error"]["code"]) == (400, "unsupported_endpoint")
