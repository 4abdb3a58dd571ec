"""Beam selection against a brute-force search and against transformers' generate."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence

import pytest
import torch

from baton_engine.scheduling.sequence_groups.beam_search import (
    BeamConfig,
    BeamState,
    Candidate,
    FinishedBeams,
    advance,
)
from baton_protocol.engine_messages import FinishReason

#: Log-probabilities of the next token, given the generated ones.
Model = Callable[[tuple[int, ...]], list[float]]
Found = list[tuple[tuple[int, ...], float, FinishReason]]


def markov(seed: int, vocab_size: int) -> Model:
    """Return a model with random log-probabilities that depend on all tokens so far."""

    def logprobs(token_ids: tuple[int, ...]) -> list[float]:
        draw = random.Random(f"{seed} {token_ids}")
        weights = [draw.random() ** 3 + 1e-3 for _ in range(vocab_size)]
        return [math.log(weight / sum(weights)) for weight in weights]

    return logprobs


def search(model: Model, config: BeamConfig, num_candidates: int | None = None) -> Found:
    """Run a whole search with `advance`; return the hypotheses, best first."""
    sequences: list[tuple[int, ...]] = [()]
    beams = [BeamState()]
    finished: FinishedBeams[tuple[tuple[int, ...], float, FinishReason]] = FinishedBeams(
        config.width
    )
    for _ in range(config.max_tokens):
        candidates = [
            best(model(sequence), num_candidates or 3 * config.width) for sequence in sequences
        ]
        step = advance(beams, candidates, config, finished.scores)
        for end in step.finished:
            finished.add(
                end.score, ((*sequences[end.parent], end.token_id), end.score, end.finish_reason)
            )
        if not step.live:
            return list(finished)
        beams = [
            BeamState(live.cumulative_logprob, beams[live.parent].num_tokens + 1)
            for live in step.live
        ]
        sequences = [(*sequences[live.parent], live.token_id) for live in step.live]
    pytest.fail("the search did not end at max_tokens")


def best(logprobs: Sequence[float], count: int) -> list[Candidate]:
    return sorted(enumerate(logprobs), key=lambda pair: (-pair[1], pair[0]))[:count]


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0, -1.0])
@pytest.mark.parametrize("seed", range(5))
def test_a_beam_wider_than_the_tree_finds_the_best_of_all_sequences(
    seed: int, length_penalty: float
) -> None:
    model, stop, vocab_size, depth = markov(seed, 3), 2, 3, 4
    config = BeamConfig(100, depth, frozenset([stop]), length_penalty)
    scores: dict[tuple[int, ...], float] = {}
    for length in range(1, depth + 1):
        for sequence in itertools.product(range(vocab_size), repeat=length):
            if stop not in sequence[:-1] and (sequence[-1] == stop or length == depth):
                total = sum(model(sequence[:i])[token] for i, token in enumerate(sequence))
                scores[sequence] = total / length**length_penalty
    found = search(model, config, vocab_size)
    assert [sequence for sequence, _, _ in found] == sorted(
        scores, key=lambda sequence: -scores[sequence]
    )[:100]
    for sequence, score, reason in found:
        assert score == pytest.approx(scores[sequence])
        assert reason is (FinishReason.STOP if sequence[-1] == stop else FinishReason.LENGTH)


@pytest.mark.parametrize("early_stopping", [False, True])
@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 1.7, -0.5])
@pytest.mark.parametrize(("width", "stops"), [(2, [1]), (4, [1, 5]), (3, [])])
def test_search_finds_the_same_beams_as_transformers_generate(
    width: int, stops: list[int], length_penalty: float, early_stopping: bool
) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    max_tokens, prompt = 8, [3, 7, 11]
    for seed in range(3):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=20,
                hidden_size=32,
                intermediate_size=32,
                num_hidden_layers=1,
                num_attention_heads=2,
                num_key_value_heads=2,
                initializer_range=1.0,
                pad_token_id=0,
                bos_token_id=None,
                eos_token_id=stops or None,
            )
        ).eval()

        def logprobs(token_ids: tuple[int, ...], model: LlamaForCausalLM = model) -> list[float]:
            with torch.inference_mode():
                logits = model(torch.tensor([[*prompt, *token_ids]])).logits[0, -1]
            return logits.float().log_softmax(-1).tolist()

        output = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=max_tokens,
            do_sample=False,
            early_stopping=early_stopping,
            length_penalty=length_penalty,
            return_dict_in_generate=True,
            output_scores=True,
        )
        found = search(
            logprobs,
            BeamConfig(width, max_tokens, frozenset(stops), length_penalty, early_stopping),
        )
        expected = [
            (strip(tokens[len(prompt) :], stops), score)
            for tokens, score in zip(
                output.sequences.tolist(), output.sequences_scores.tolist(), strict=True
            )
            if score > -1e8  # lower in unused slots
        ]
        assert [sequence for sequence, _, _ in found] == [sequence for sequence, _ in expected]
        assert [score for _, score, _ in found] == pytest.approx(
            [score for _, score in expected], abs=1e-4
        )


def strip(token_ids: list[int], stops: list[int]) -> tuple[int, ...]:
    """Remove the padding after a stop token."""
    ends = [place for place, token in enumerate(token_ids) if token in stops]
    return tuple(token_ids[: ends[0] + 1] if ends else token_ids)


def test_ties_prefer_the_earlier_beam_then_the_lower_token_id() -> None:
    beams = [BeamState(-1.0, 1), BeamState(-1.0, 1)]
    step = advance(beams, [[(9, -0.5), (4, -0.5)], [(1, -0.5), (3, -0.5)]], BeamConfig(3, 10))
    assert [(live.parent, live.token_id) for live in step.live] == [(0, 4), (0, 9), (1, 1)]


def test_a_stop_token_ranked_below_the_beam_width_does_not_finish_a_hypothesis() -> None:
    config = BeamConfig(2, 10, frozenset([0]))
    step = advance([BeamState()], [[(1, -0.1), (2, -0.2), (0, -0.3), (3, -4.0)]], config)
    assert step.finished == []
    assert [live.token_id for live in step.live] == [1, 2]
    step = advance([BeamState()], [[(1, -0.1), (0, -0.2), (2, -0.3), (3, -4.0)]], config)
    assert [(end.token_id, end.finish_reason) for end in step.finished] == [(0, FinishReason.STOP)]
    assert [live.token_id for live in step.live] == [1, 2]


def test_a_search_ends_when_no_live_beam_can_beat_the_worst_finished_one() -> None:
    config = BeamConfig(1, 10, frozenset([0]), length_penalty=0.0)
    candidates = [[(1, -1.0), (2, -2.0)]]
    assert advance([BeamState(0.0, 1)], candidates, config, [-1.5]).live
    assert not advance([BeamState(0.0, 1)], candidates, config, [-1.0]).live
    early = BeamConfig(1, 10, frozenset([0]), length_penalty=0.0, early_stopping=True)
    assert not advance([BeamState(0.0, 1)], candidates, early, [-1.5]).live


def test_a_finished_hypothesis_worse_than_the_kept_ones_is_dropped() -> None:
    config = BeamConfig(1, 10, frozenset([0]), length_penalty=0.0)
    step = advance([BeamState(0.0, 1)], [[(0, -2.0), (1, -3.0)]], config, [-1.0])
    assert step.finished == []
    assert not step.live


def test_impossible_continuations_are_skipped_and_a_search_without_others_ends() -> None:
    step = advance([BeamState()], [[(4, -0.1), (5, -math.inf)]], BeamConfig(2, 10))
    assert [live.token_id for live in step.live] == [4]
    dead_end = advance([BeamState()], [[(4, -math.inf)]], BeamConfig(2, 10))
    assert (dead_end.live, dead_end.finished) == ([], [])


def test_finished_beams_keep_the_best_scores_and_prefer_earlier_ones_on_ties() -> None:
    beams: FinishedBeams[str] = FinishedBeams(3)
    for score, name in ((-2.0, "a"), (-1.0, "b"), (-2.0, "c"), (-1.0, "d"), (-3.0, "e")):
        beams.add(score, name)
    assert list(beams) == ["b", "d", "a"]
    assert beams.scores == [-1.0, -1.0, -2.0]
    assert len(beams) == 3
