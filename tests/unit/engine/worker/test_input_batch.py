"""InputBatch against a simple model of its requests: random steps, growth and limits."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from baton_engine.executor.step import BlockCopy, CachedRequestData, NewRequestData
from baton_engine.worker import input_batch
from baton_engine.worker.input_batch import InputBatch
from baton_protocol.sampling_params import SamplingParams
from support.engine.fake_gpu import NOT_COPIED, LateTokens

GREEDY = SamplingParams(temperature=0.0)
BLOCK_SIZE = 4
CPU = torch.device("cpu")
NO_CACHE = torch.empty(0)


def new_request(
    request_id: str, num_tokens: int, params: SamplingParams = GREEDY
) -> NewRequestData:
    blocks = list(range(-(-num_tokens // BLOCK_SIZE)))
    return NewRequestData(request_id, list(range(num_tokens)), [], params, 0, blocks, 0)


@pytest.mark.parametrize("pending", [0.0, 0.5, 1.0], ids=["at once", "some late", "all late"])
@pytest.mark.parametrize("seed", range(5))
def test_random_steps_give_the_batches_of_a_simple_model(
    seed: int, pending: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests join, run chunks, get or replace blocks, get tokens, sample and leave.

    Args:
        pending: probability that a step's tokens reach the host after the step.
    """
    monkeypatch.setattr(input_batch, "INITIAL_WIDTH", 5)
    draw = random.Random(seed)
    batch = InputBatch(max_num_seqs=6, max_model_len=80, block_size=BLOCK_SIZE)
    tokens: dict[str, list[int]] = {}
    tables: dict[str, list[int]] = {}
    computed: dict[str, int] = {}
    blocks = iter(range(10**6))
    for step in range(120):
        for request_id in [r for r in tokens if draw.random() < 0.05 or len(tokens[r]) > 70]:
            batch.remove([request_id])
            del tokens[request_id], tables[request_id], computed[request_id]
        if len(tokens) < 6 and draw.random() < 0.3:
            request_id, length = f"r{step}", draw.randint(1, 20)
            tokens[request_id] = [draw.randrange(1000) for _ in range(length)]
            tables[request_id] = [next(blocks) for _ in range(-(-length // BLOCK_SIZE))]
            computed[request_id] = 0
            batch.add(
                NewRequestData(
                    request_id, list(tokens[request_id]), [], GREEDY, 0, list(tables[request_id]), 0
                )
            )
            known = [r for r in tokens if r != request_id]
        else:
            known = list(tokens)
        cached = []
        for request_id in known:
            change = CachedRequestData(request_id, [], computed[request_id])
            if computed[request_id] == len(tokens[request_id]) - 1 and draw.random() < 0.2:
                tokens[request_id][-1] = draw.randrange(1000)
                change.new_token_ids = [tokens[request_id][-1]]
            if draw.random() < 0.2:
                place = draw.randrange(len(tables[request_id]))
                copy = BlockCopy(tables[request_id][place], next(blocks))
                tables[request_id][place] = copy.target
                change.replaced_blocks = [copy]
            while len(tables[request_id]) * BLOCK_SIZE < len(tokens[request_id]):
                change.new_block_ids = [*change.new_block_ids, next(blocks)]
                tables[request_id].append(change.new_block_ids[-1])
            cached.append(change)
        draw.shuffle(cached)
        batch.update(cached)
        if not tokens:
            continue
        counts = {
            r: draw.choice([1, draw.randint(1, len(tokens[r]) - computed[r])])
            for r in draw.sample(list(tokens), len(tokens))
        }
        scheduled = batch.schedule(counts)
        forward = batch.make_forward_batch(scheduled, NO_CACHE, CPU)
        spans = {r: range(computed[r], computed[r] + n) for r, n in counts.items()}
        assert forward.input_ids.tolist() == [
            tokens[r][p] for r, span in spans.items() for p in span
        ]
        assert forward.positions.tolist() == [p for span in spans.values() for p in span]
        assert forward.context.slot_mapping.tolist() == [
            tables[r][p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE
            for r, span in spans.items()
            for p in span
        ]
        assert forward.context.cu_seqlens_q.tolist() == [0, *np.cumsum(list(counts.values()))]
        assert forward.context.max_seqlen_q == max(counts.values())
        assert forward.context.seq_lens.tolist() == [span.stop for span in spans.values()]
        for row, (r, span) in enumerate(spans.items()):
            used = -(-span.stop // BLOCK_SIZE)
            assert forward.context.block_tables[row, :used].tolist() == tables[r][:used]
        reaches = batch.reaches_last_token(scheduled)
        assert reaches.tolist() == [span.stop == len(tokens[r]) for r, span in spans.items()]
        sampled = [draw.randrange(1000) for _ in range(int(reaches.sum()))]
        if sampled and draw.random() < pending:
            batch.append_pending(scheduled.rows[reaches], LateTokens(torch.tensor(sampled), None))
        elif sampled:
            batch.append_tokens(scheduled.rows[reaches], sampled)
        for r, token in zip(
            [r for r, samples in zip(spans, reaches, strict=True) if samples], sampled, strict=True
        ):
            tokens[r].append(token)
        for r, span in spans.items():
            computed[r] = span.stop
        if draw.random() < pending:
            continue
        for item, r in zip(batch.sampling_inputs(scheduled.rows), spans, strict=True):
            assert [*item.prompt_token_ids, *item.generated_token_ids] == tokens[r]


def test_pending_tokens_do_not_reach_a_row_that_another_request_has_taken() -> None:
    batch = InputBatch(max_num_seqs=2, max_model_len=40, block_size=BLOCK_SIZE)
    batch.add(new_request("stays", 8))
    batch.add(new_request("ends", 8))
    rows = batch.rows(["ends", "stays"])
    batch.append_pending(rows, LateTokens(torch.tensor([901, 902]), None))
    batch.remove(["ends"])
    batch.add(new_request("joins", 9))  # its last token has the place of the pending one
    assert batch.rows(["joins"]) == rows[:1]
    batch.update([CachedRequestData("stays", [2], 8)])
    scheduled = batch.schedule({"joins": 9, "stays": 1})
    forward = batch.make_forward_batch(scheduled, NO_CACHE, CPU)
    assert forward.input_ids.tolist() == [*range(9), 902]
    assert batch.token_ids[rows[1], 8] != 902, "building a step has waited for the tokens"
    batch.settle()
    assert batch.token_ids[rows, 8].tolist() == [8, 902]
    assert NOT_COPIED not in batch.token_ids


def test_rows_are_looked_up_again_after_requests_left_and_came_back() -> None:
    batch = InputBatch(max_num_seqs=2, max_model_len=40, block_size=BLOCK_SIZE)
    batch.add(new_request("a", 8))
    batch.add(new_request("b", 8))
    before = batch.rows(["a", "b"]).tolist()
    batch.remove(["a", "b"])
    batch.add(new_request("a", 8))
    batch.add(new_request("b", 8))
    assert sorted(before) == sorted(batch.rows(["a", "b"]).tolist())
    assert batch.rows(["a", "b"]).tolist() == [batch.rows(["a"])[0], batch.rows(["b"])[0]]


def test_memory_grows_with_the_longest_request_and_frees_the_old_arrays() -> None:
    batch = InputBatch(max_num_seqs=4, max_model_len=100_000, block_size=BLOCK_SIZE)
    assert batch.token_ids.nbytes < 10**6
    batch.add(new_request("short", 10))
    prompt = batch.sampling_inputs(batch.rows(["short"]))[0].prompt_token_ids
    batch.add(new_request("long", 100_000))
    batch.append_tokens(batch.rows(["long"]), [7])
    assert batch.token_ids.shape[1] == 100_001
    short = batch.sampling_inputs(batch.rows(["short"]))[0]
    assert short.prompt_token_ids.tolist() == prompt.tolist()
    assert short.prompt_token_ids.base is not prompt.base, "the old array is still held"


def test_errors_of_impossible_steps_name_the_request() -> None:
    batch = InputBatch(max_num_seqs=1, max_model_len=40, block_size=BLOCK_SIZE)
    with pytest.raises(RuntimeError, match="request long has 41 tokens, over max_model_len=40"):
        batch.add(new_request("long", 41))
    batch.add(new_request("first", 4))
    with pytest.raises(RuntimeError, match="request second: all 1 rows"):
        batch.add(new_request("second", 4))
    with pytest.raises(RuntimeError, match="request ghost is scheduled as known"):
        batch.update([CachedRequestData("ghost", [], 1)])


@pytest.mark.parametrize(
    ("params", "plain"),
    [
        (SamplingParams(temperature=0.0), True),
        (
            SamplingParams(
                temperature=0.0, top_p=0.5, top_k=3, seed=9, max_tokens=4, ignore_eos=True
            ),
            True,
        ),
        (SamplingParams(), False),
        (SamplingParams(temperature=0.0, logprobs=0), False),
        (SamplingParams(temperature=0.0, min_tokens=1), False),
        (SamplingParams(temperature=0.0, logit_bias={1: 2.0}), False),
        (SamplingParams(temperature=0.0, allowed_token_ids=[1]), False),
        (SamplingParams(temperature=0.0, bad_words_token_ids=[[1]]), False),
        (SamplingParams(temperature=0.0, repetition_penalty=1.1), False),
        (SamplingParams(temperature=0.0, beam_width=2), False),
    ],
)
def test_only_greedy_requests_without_other_sampling_options_are_plain(
    params: SamplingParams, plain: bool
) -> None:
    batch = InputBatch(max_num_seqs=1, max_model_len=40, block_size=BLOCK_SIZE)
    batch.add(new_request("request", 4, params))
    assert batch.is_plain[batch.rows(["request"])].tolist() == [plain]
