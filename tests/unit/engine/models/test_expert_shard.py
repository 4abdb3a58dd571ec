"""Expert-parallel layers and models compute the same as one rank that has all experts."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from baton_engine.distributed.group_errors import GroupBrokenError
from baton_engine.models import expert_shard
from baton_engine.models.checkpoint.checkpoint_config import load_checkpoint_config
from baton_engine.models.checkpoint.sharding import ALONE
from baton_engine.models.errors import ModelInvalid
from baton_engine.models.expert_shard import ExpertShard, LayerPlacement, uses_masked_layout
from baton_engine.models.factory import load_model
from baton_engine.models.forward_context import forward_context
from baton_engine.random_checkpoint import create_checkpoint
from baton_engine.worker.experts.expert_weights import ExpertForm
from baton_engine.worker.forward.dummy_steps import no_batch
from baton_engine.worker.packed_weights import quantize_weights
from baton_kernels.moe import route_top_k, run_experts
from baton_kernels.moe.reference import run_experts_reference
from baton_protocol.options.config import QUANTIZATIONS
from support.engine.model_cases import CPU, load, run_model, run_threads
from support.engine.ranks.expert_ranks import (
    ThreadNetwork,
    ThreadRank,
    commit_everywhere,
    compute_waves,
    generation,
    place_experts,
    run_expert_parallel,
    thread_groups,
)

pytestmark = pytest.mark.usefixtures("one_thread")

HIDDEN, INTERMEDIATE, NUM_EXPERTS = 16, 24, 8
SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_layers": 2, "vocab_size": 301}
TOLERANCE = 3e-5  # the logits have a standard deviation of 3
LAYOUTS = ["masked", "contiguous"]


@pytest.fixture(scope="module", params=["qwen3_moe", "mixtral"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return create_checkpoint(
        tmp_path_factory.mktemp("experts") / request.param, request.param, seed=3, **SMALL
    )


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(expert_shard, "MASKED_ROWS", 0 if request.param == "contiguous" else 10**6)
    return request.param


def make_weights() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    gate_up = torch.randn(NUM_EXPERTS, 2 * INTERMEDIATE, HIDDEN, generator=generator) / 4
    return gate_up, torch.randn(NUM_EXPERTS, HIDDEN, INTERMEDIATE, generator=generator) / 4


def make_shards(placement: LayerPlacement, gate_up: Tensor, down: Tensor) -> list[ExpertShard]:
    groups = thread_groups(len(placement))
    return [
        ExpertShard(group, placement, NUM_EXPERTS, gate_up[list(slots)], down[list(slots)], CPU)
        for group, slots in zip(groups, placement, strict=True)
    ]


def route(num_tokens: int, top_k: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_tokens, HIDDEN, generator=generator)
    return x, *route_top_k(torch.randn(num_tokens, NUM_EXPERTS, generator=generator), top_k, True)


def mix_everywhere(
    shards: list[ExpertShard], inputs: list[tuple[Tensor, Tensor, Tensor]]
) -> tuple[list[Tensor], tuple[int, ...]]:
    wave_tokens = tuple(len(x) for x, _, _ in inputs)
    works = [
        lambda shard=shard, own=own: shard.mix(*own, wave_tokens)
        for shard, own in zip(shards, inputs, strict=True)
    ]
    return run_threads(works, on_error=shards[0].group.abort), wave_tokens


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[list[int]], list[int], int, int]:
    """Draw (placement, number of tokens of each rank, experts per token, seed).

    The placement has at least one replica of every expert.
    """
    num_ranks = draw(st.integers(1, 5))
    least = -(-NUM_EXPERTS // num_ranks)
    num_slots = draw(st.integers(least, NUM_EXPERTS))
    extra = num_ranks * num_slots - NUM_EXPERTS
    entries = [*range(NUM_EXPERTS), *(draw(st.integers(0, NUM_EXPERTS - 1)) for _ in range(extra))]
    entries = draw(st.permutations(entries))
    placement = [entries[rank * num_slots : (rank + 1) * num_slots] for rank in range(num_ranks)]
    tokens = draw(
        st.lists(st.sampled_from([0, 0, 1, 2, 7, 30]), min_size=num_ranks, max_size=num_ranks)
    )
    return placement, tokens, draw(st.integers(1, 4)), draw(st.integers(0, 99))


@pytest.mark.parametrize("layout", LAYOUTS)
@given(case=cases())
@settings(max_examples=60, deadline=None)
def test_any_placement_gives_the_result_of_one_rank_and_counts_the_chosen_experts(
    layout: str, case: tuple[list[list[int]], list[int], int, int]
) -> None:
    placement, num_tokens, top_k, seed = case
    gate_up, down = make_weights()
    shards = make_shards(placement, gate_up, down)
    inputs = [route(number, top_k, seed + rank) for rank, number in enumerate(num_tokens)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expert_shard, "MASKED_ROWS", 0 if layout == "contiguous" else 10**6)
        results, _ = mix_everywhere(shards, inputs)
    for shard, (x, weights, ids), result in zip(shards, inputs, results, strict=True):
        expected = run_experts_reference(x, gate_up, down, weights, ids)
        torch.testing.assert_close(result, expected, atol=1e-5, rtol=0)
        assert shard.tokens.tolist() == [
            int((ids == expert).sum()) for expert in range(NUM_EXPERTS)
        ]


def test_results_in_bfloat16_are_close_to_those_of_one_rank(layout: str) -> None:
    gate_up, down = (weights.bfloat16() for weights in make_weights())
    shards = make_shards(place_experts(1, NUM_EXPERTS, 4)[0], gate_up, down)
    inputs = [
        tuple(t.bfloat16() if t.is_floating_point() else t for t in route(5, 4, seed))
        for seed in range(4)
    ]
    results, _ = mix_everywhere(shards, inputs)
    for (x, weights, ids), result in zip(inputs, results, strict=True):
        assert result.dtype is torch.bfloat16
        torch.testing.assert_close(
            result, run_experts(x, gate_up, down, weights, ids), atol=0.05, rtol=0.02
        )


def test_a_repeated_step_gives_the_same_bits(layout: str) -> None:
    gate_up, down = make_weights()
    inputs = [route(number, 4, number) for number in (9, 0, 17)]
    runs = [
        mix_everywhere(make_shards(place_experts(1, NUM_EXPERTS, 3, 4)[0], gate_up, down), inputs)[
            0
        ]
        for _ in range(5)
    ]
    assert all(
        torch.equal(own, other) for run in runs[1:] for own, other in zip(runs[0], run, strict=True)
    )


def test_a_decode_step_needs_two_exchanges_and_a_prefill_step_three() -> None:
    gate_up, down = make_weights()
    for num_tokens, exchanges in ((1, 2), (200, 3)):
        shards = make_shards(place_experts(1, NUM_EXPERTS, 2)[0], gate_up, down)
        inputs = [route(num_tokens, 2, seed) for seed in range(2)]
        _, wave_tokens = mix_everywhere(shards, inputs)
        assert uses_masked_layout(wave_tokens) == (exchanges == 2)
        # ThreadGroup counts an exchange twice: for the numbers of rows and for the rows.
        assert shards[0].group.calls == {"all_to_all": 2 * exchanges}
    idle = make_shards(place_experts(1, NUM_EXPERTS, 2)[0], gate_up, down)
    mix_everywhere(idle, [route(0, 2, 0)] * 2)
    assert idle[0].group.calls == {}, "a step without tokens on any rank needs no exchange"


def test_tokens_use_the_local_replica_or_else_all_replicas_in_turn() -> None:
    gate_up, down = make_weights()
    placement = [[0, 1, 2, 3], [4, 5, 6, 7], [7, 6, 5, 4]]
    shards = make_shards(placement, gate_up, down)
    ids = torch.full((10, 1), 6)
    ranks, slots = shards[0]._copies.choose(ids)
    assert sorted(ranks.flatten().tolist()) == [1] * 5 + [2] * 5
    assert {
        (rank, slot)
        for rank, slot in zip(ranks.flatten().tolist(), slots.flatten().tolist(), strict=True)
    } == {(1, 2), (2, 1)}
    for rank in (1, 2):
        assert shards[rank]._copies.choose(ids)[0].unique().tolist() == [rank]


def test_a_placement_without_an_expert_is_refused_with_its_number() -> None:
    with pytest.raises(ValueError, match="expert 7 is on no rank"):
        make_shards([[0, 1, 2, 3], [4, 5, 6, 6]], *make_weights())


def test_a_number_of_tokens_other_than_in_wave_tokens_is_refused() -> None:
    shards = make_shards(place_experts(1, NUM_EXPERTS, 2)[0], *make_weights())
    for wave_tokens in ((), (3, 0), (4,)):
        with pytest.raises(RuntimeError, match="rank 0 of 2 runs 4 tokens in a step of"):
            shards[0].mix(*route(4, 2, 0), wave_tokens)


def make_sequences(num_ranks: int, length: int) -> list[list[list[int]]]:
    """Return the sequences of each rank: up to three, of other lengths than on other ranks."""
    draw = random.Random(1)
    numbers = [2, 1, 3, 1, 2, 1, 1, 0][-num_ranks:]
    if num_ranks == 1:
        numbers = [2]
    return [
        [[draw.randrange(301) for _ in range(max(1, length - 3 * rank))] for _ in range(number)]
        for rank, number in enumerate(numbers)
    ]


@pytest.mark.parametrize("num_redundant", [0, 3])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
def test_logits_equal_those_of_one_rank(
    checkpoint: Path, num_ranks: int, num_redundant: int, layout: str
) -> None:
    network = ThreadNetwork()
    ranks = [ThreadRank(f"r{number}", checkpoint, network) for number in range(num_ranks)]
    placement = place_experts(2, ranks[0].store.num_experts, num_ranks, num_redundant)
    commit_everywhere(ranks, generation(1, [rank.name for rank in ranks], placement))
    sequences, chunk = make_sequences(num_ranks, 24), 7
    waves = compute_waves(sequences, chunk)
    works = [
        lambda rank=rank, own=own: run_expert_parallel(rank.model, own, chunk, waves)
        for rank, own in zip(ranks, sequences, strict=True)
    ]
    alone = load(checkpoint)
    for own, logits in zip(sequences, run_threads(works), strict=True):
        if own:
            torch.testing.assert_close(logits, run_model(alone, own, chunk), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_layers_with_quantized_experts_compute_the_same_as_those_of_a_quantized_model(
    checkpoint: Path, layout: str, quantization: str
) -> None:
    """A whole model rounds at every product, which would amplify differences of the last bits."""
    network = ThreadNetwork()
    form = ExpertForm[quantization.upper()]
    ranks = [ThreadRank(f"r{number}", checkpoint, network, form=form) for number in range(3)]
    num_experts = ranks[0].store.num_experts
    commit_everywhere(ranks[:2], generation(1, ["r0", "r1"], place_experts(2, num_experts, 2)))
    # The third rank receives its experts from the others.
    commit_everywhere(ranks, generation(2, ["r0", "r1", "r2"], place_experts(2, num_experts, 3)))
    model = load(checkpoint)
    quantize_weights(model, quantization)
    x = torch.randn(12, 64)
    parts = x.split([7, 0, 5])
    for (_, whole), *layers in zip(
        model.sparse_layers, *(rank.model.sparse_layers for rank in ranks), strict=True
    ):
        with forward_context(no_batch(torch.empty(0), CPU)):
            expected = whole(x)

        def run(layer: torch.nn.Module, part: Tensor) -> Tensor:
            context = no_batch(torch.empty(0), CPU)
            context.wave_tokens = (7, 0, 5)
            with forward_context(context):
                return layer(part) if len(part) else (layer.run_dummy_batch(), part)[1]

        works = [
            lambda layer=layer, part=part: run(layer, part)
            for (_, layer), part in zip(layers, parts, strict=True)
        ]
        torch.testing.assert_close(torch.cat(run_threads(works)), expected, atol=1e-5, rtol=1e-5)


def test_routed_experts_and_loads_use_the_experts_numbers_in_the_model(checkpoint: Path) -> None:
    network = ThreadNetwork()
    ranks = [ThreadRank(f"r{number}", checkpoint, network) for number in range(2)]
    commit_everywhere(
        ranks, generation(1, ["r0", "r1"], place_experts(2, ranks[0].store.num_experts, 2, 4))
    )
    layers = [rank.model.sparse_layers[0][1] for rank in ranks]
    x = torch.randn(4, 64)

    def run(rank: int) -> list[Tensor]:
        context = no_batch(torch.empty(0), CPU)
        context.wave_tokens, context.routed_experts = (4, 0), []
        with forward_context(context):
            layers[rank](x) if rank == 0 else layers[rank].run_dummy_batch()
        return context.routed_experts

    found, _ = run_threads([lambda: run(0), lambda: run(1)])
    _, ids = route_top_k(layers[0].gate(x), layers[0].top_k, layers[0].renormalize)
    assert torch.equal(found[0], ids)
    assert ranks[0].generations.loads().tokens[0] == tuple(
        ids.flatten().bincount(minlength=8).tolist()
    )
    assert sum(map(sum, ranks[1].generations.loads().tokens)) == 0


def test_a_model_runs_without_experts_before_the_first_generation(checkpoint: Path) -> None:
    rank = ThreadRank("r0", checkpoint, ThreadNetwork())
    logits = run_expert_parallel(rank.model, [[1, 2, 3]], 3, [()])
    assert torch.isfinite(logits).all()
    assert not any("experts" in name for name, _ in rank.model.named_parameters())


def test_a_forward_pass_ends_after_its_group_breaks_and_works_again_after_the_next_commit(
    checkpoint: Path,
) -> None:
    network = ThreadNetwork()
    ranks = [ThreadRank(f"r{number}", checkpoint, network) for number in range(2)]
    num_experts = ranks[0].store.num_experts
    commit_everywhere(ranks, generation(1, ["r0", "r1"], place_experts(2, num_experts, 2)))
    ranks[1].generations.interrupt()
    with pytest.raises(GroupBrokenError):
        run_expert_parallel(ranks[0].model, [[1, 2, 3]], 3, [(3, 0)])
    commit_everywhere(ranks[:1], generation(2, ["r0"], place_experts(2, num_experts, 1)))
    logits = run_expert_parallel(ranks[0].model, [[1, 2, 3]], 3, [(3,)])
    torch.testing.assert_close(
        logits, run_model(load(checkpoint), [[1, 2, 3]], 3), atol=TOLERANCE, rtol=0
    )


def test_an_expert_missing_in_the_checkpoint_is_an_error_before_experts_are_loaded(
    tmp_path: Path,
) -> None:
    path = create_checkpoint(tmp_path / "model", "mixtral", **SMALL)
    weights = load_file(path / "model.safetensors")
    del weights["model.layers.1.block_sparse_moe.experts.3.w2.weight"]
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelInvalid, match=r"experts\.3\.w2\.weight is missing"):
        load_model(
            path, load_checkpoint_config(path), torch.float32, CPU, ALONE, expert_parallel=True
        )
