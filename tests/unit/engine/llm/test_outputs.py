"""The outputs of generate, chat and beam_search on a tiny checkpoint, against transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton_engine import LLM, BeamSearchParams, SamplingParams, StructuredOutputsParams
from support.engine.offline_llm import GREEDY, make_llm, metric
from support.parity import assert_greedy, prompts, reference_model


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> torch.nn.Module:
    return reference_model(checkpoint)


def test_greedy_tokens_match_transformers(llm: LLM, reference: torch.nn.Module) -> None:
    ids = prompts(8, 512, longest=60)
    outputs = llm.generate(ids, GREEDY, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == ids
    assert_greedy(
        reference, ids, [output.outputs[0].token_ids for output in outputs], "LLM.generate"
    )
    assert all(
        output.finished and output.outputs[0].finish_reason == "length" for output in outputs
    )


def test_outputs_are_in_the_order_of_the_prompts_for_every_form_of_prompt(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    ids = tokenizer.encode("hello")
    forms = ["hello", ids, {"prompt": "hello"}, {"prompt_token_ids": ids}]
    outputs = llm.generate(["a much longer text, to end later", *forms], GREEDY, use_tqdm=False)
    assert [output.prompt for output in outputs[1:]] == ["hello", None, "hello", None]
    assert {tuple(output.outputs[0].token_ids) for output in outputs[1:]} == {
        tuple(outputs[1].outputs[0].token_ids)
    }
    for single in forms:
        [output] = llm.generate(single, GREEDY, use_tqdm=False)
        assert output.outputs[0].token_ids == outputs[1].outputs[0].token_ids
    assert llm.generate([], GREEDY) == []


def test_each_prompt_can_have_its_own_sampling_params(llm: LLM) -> None:
    params = [
        SamplingParams(max_tokens=length, temperature=0, ignore_eos=True) for length in (3, 9, 1)
    ]
    outputs = llm.generate(["a", "b", "c"], params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [3, 9, 1]
    with pytest.raises(ValueError, match="one for all or one per prompt: got 3 for 2"):
        llm.generate(["a", "b"], params)


def test_n_samples_differ_and_the_same_seed_repeats_them(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=7, max_tokens=10, ignore_eos=True)
    [first], [again] = (llm.generate("hello", params, use_tqdm=False) for _ in range(2))
    texts = [output.token_ids for output in first.outputs]
    assert [output.index for output in first.outputs] == [0, 1, 2]
    assert len({tuple(ids) for ids in texts}) == 3
    assert [output.token_ids for output in again.outputs] == texts
    [alone] = llm.generate(
        "hello", SamplingParams(seed=7, max_tokens=10, ignore_eos=True), use_tqdm=False
    )
    assert alone.outputs[0].token_ids == texts[0]


def test_requests_without_a_seed_get_seeds_drawn_from_the_seed_of_the_llm(
    llm: LLM, checkpoint: Path
) -> None:
    params = SamplingParams(max_tokens=10, ignore_eos=True)
    texts = [
        output.outputs[0].token_ids
        for output in llm.generate(["hello"] * 2, params, use_tqdm=False)
    ]
    assert texts[0] != texts[1]
    drawn = []
    for _ in range(2):
        with make_llm(checkpoint, seed=5) as fresh:
            drawn.append(
                [
                    o.outputs[0].token_ids
                    for o in fresh.generate(["hello"] * 2, params, use_tqdm=False)
                ]
            )
    assert drawn[0] == drawn[1]


def test_best_of_returns_the_most_likely_samples_first(llm: LLM) -> None:
    every = SamplingParams(n=6, seed=1, max_tokens=8, logprobs=0, ignore_eos=True)
    [all_six] = llm.generate("hello", every, use_tqdm=False)
    ranked = sorted(
        all_six.outputs, key=lambda o: o.cumulative_logprob / len(o.token_ids), reverse=True
    )
    best = SamplingParams(n=2, best_of=6, seed=1, max_tokens=8, ignore_eos=True)
    [output] = llm.generate("hello", best, use_tqdm=False)
    assert [o.token_ids for o in output.outputs] == [o.token_ids for o in ranked[:2]]
    assert [o.index for o in output.outputs] == [0, 1]
    assert output.outputs[0].logprobs is None, "logprobs were not requested"


def test_logprobs_match_transformers(llm: LLM, reference: torch.nn.Module) -> None:
    params = SamplingParams(
        temperature=0, max_tokens=6, logprobs=3, prompt_logprobs=2, ignore_eos=True
    )
    [output] = llm.generate("hello world", params, use_tqdm=False)
    sample, prompt = output.outputs[0], output.prompt_token_ids
    with torch.inference_mode():
        logprobs = (
            reference(torch.tensor([prompt + sample.token_ids])).logits[0].log_softmax(dim=-1)
        )
    expected = logprobs[len(prompt) - 1 : -1]
    for position, (token_id, candidates) in enumerate(
        zip(sample.token_ids, sample.logprobs, strict=True)
    ):
        assert candidates[token_id].logprob == pytest.approx(
            expected[position, token_id].item(), abs=1e-4
        )
        assert candidates[token_id].rank == 1
        assert len(candidates) == 3
    assert sample.cumulative_logprob == pytest.approx(
        sum(c[t].logprob for t, c in zip(sample.token_ids, sample.logprobs, strict=True))
    )
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(prompt)
    for position in range(1, len(prompt)):
        own = output.prompt_logprobs[position][prompt[position]]
        assert own.logprob == pytest.approx(
            logprobs[position - 1, prompt[position]].item(), abs=1e-4
        )


def test_prompt_logprobs_are_not_repeated_for_n_samples(llm: LLM) -> None:
    plain, several = (
        llm.generate(
            "hello world", SamplingParams(n=n, max_tokens=3, prompt_logprobs=1), use_tqdm=False
        )[0]
        for n in (1, 3)
    )
    assert len(several.prompt_logprobs) == len(several.prompt_token_ids)
    for one, other in zip(plain.prompt_logprobs[1:], several.prompt_logprobs[1:], strict=True):
        assert one.keys() == other.keys()


def test_a_stop_string_ends_the_text_and_the_request(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    [whole] = llm.generate("hello", params, use_tqdm=False)
    text = whole.outputs[0].text
    stop = text[20:24]
    first = text.index(stop)
    for include in (False, True):
        params = SamplingParams(
            temperature=0,
            max_tokens=200,
            ignore_eos=True,
            stop=stop,
            include_stop_str_in_output=include,
        )
        [output] = llm.generate("hello", params, use_tqdm=False)
        sample = output.outputs[0]
        assert sample.text == text[: first + len(stop) if include else first]
        assert (sample.finish_reason, sample.stop_reason) == ("stop", stop)
        assert len(sample.token_ids) < 200
    assert metric(llm, "baton:num_requests_running") == 0
    assert metric(llm, "baton:kv_cache_usage_perc") == 0


def test_a_stop_token_is_the_stop_reason_and_not_part_of_the_text(llm: LLM) -> None:
    [whole] = llm.generate("hello", GREEDY, use_tqdm=False)
    token_id = whole.outputs[0].token_ids[3]
    params = SamplingParams(
        temperature=0, max_tokens=12, ignore_eos=True, stop_token_ids=[token_id]
    )
    sample = llm.generate("hello", params, use_tqdm=False)[0].outputs[0]
    assert (sample.finish_reason, sample.stop_reason) == ("stop", token_id)
    end = whole.outputs[0].token_ids.index(token_id)
    assert sample.token_ids == whole.outputs[0].token_ids[: end + 1]
    assert sample.text == llm.get_tokenizer().decode(sample.token_ids[:-1])


def test_bad_words_are_not_generated(llm: LLM) -> None:
    [whole] = llm.generate("hello", GREEDY, use_tqdm=False)
    tokenizer = llm.get_tokenizer()
    words = [tokenizer.decode([token_id]) for token_id in whole.outputs[0].token_ids]
    word = next(word for word in words if word.strip().isalpha()).strip()
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, bad_words=[word])
    sample = llm.generate("hello", params, use_tqdm=False)[0].outputs[0]
    banned = {
        tuple(tokenizer.encode(form, add_special_tokens=False)) for form in (word, f" {word}")
    }
    pairs = [
        tuple(sample.token_ids[i : i + len(ids)])
        for ids in banned
        for i in range(len(sample.token_ids))
    ]
    assert not banned & set(pairs)


def test_chat_equals_generate_on_the_rendered_chat_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    [answer] = llm.chat(messages, GREEDY, use_tqdm=False)
    assert answer.prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    ids = llm.get_tokenizer().encode(answer.prompt, add_special_tokens=False)
    [same] = llm.generate([ids], GREEDY, use_tqdm=False)
    assert answer.outputs[0].token_ids == same.outputs[0].token_ids
    two = llm.chat([messages, messages], GREEDY, use_tqdm=False)
    assert [output.outputs[0].text for output in two] == [answer.outputs[0].text] * 2
    [other] = llm.chat(messages, GREEDY, use_tqdm=False, chat_template="{{ messages[0].content }}!")
    assert other.prompt == "hi!"
    with pytest.raises(ValueError, match=r"messages\[0\].role"):
        llm.chat([{"role": "wizard", "content": "hi"}])


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 1.5])
def test_beams_match_transformers(
    llm: LLM, reference: torch.nn.Module, length_penalty: float
) -> None:
    ids = llm.get_tokenizer().encode("hello world")
    params = BeamSearchParams(
        beam_width=4, max_tokens=8, length_penalty=length_penalty, ignore_eos=True
    )
    [result] = llm.beam_search([ids], params)
    with torch.inference_mode():
        expected = reference.generate(
            torch.tensor([ids]),
            num_beams=4,
            num_return_sequences=4,
            max_new_tokens=8,
            length_penalty=length_penalty,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            output_scores=True,
            return_dict_in_generate=True,
        )
    assert [beam.tokens for beam in result.sequences] == expected.sequences.tolist()
    scores = [beam.score for beam in result.sequences]
    assert scores == pytest.approx(expected.sequences_scores.tolist(), abs=1e-3)
    assert result.sequences[0].text == llm.get_tokenizer().decode(result.sequences[0].tokens)


def test_the_text_follows_structured_outputs(llm: LLM) -> None:
    choice = SamplingParams(
        max_tokens=20, structured_outputs=StructuredOutputsParams(choice=["left", "right"])
    )
    digits = SamplingParams(
        max_tokens=20, structured_outputs=StructuredOutputsParams(regex="[0-9]{3}")
    )
    outputs = llm.generate(["where", "how many"], [choice, digits], use_tqdm=False)
    assert outputs[0].outputs[0].text in ("left", "right")
    assert len(outputs[1].outputs[0].text) == 3
    assert outputs[1].outputs[0].text.isdigit()


def test_prompts_without_parameters_get_those_of_the_checkpoint(
    checkpoint: Path, tmp_path: Path
) -> None:
    path = shutil.copytree(checkpoint, tmp_path / "tuned")
    content = {"temperature": 0.0, "top_k": 9, "max_new_tokens": 5}
    (path / "generation_config.json").write_text(json.dumps(content))
    with make_llm(path) as llm:
        params = llm.get_default_sampling_params()
        assert (params.temperature, params.top_k, params.max_tokens) == (0.0, 9, 5)
        without, with_defaults = (
            llm.generate([5, 6, 7], given, use_tqdm=False)[0].outputs[0] for given in (None, params)
        )
        assert without.token_ids == with_defaults.token_ids
        assert len(without.token_ids) <= 5
    with make_llm(path, generation_config="none") as llm:
        assert llm.get_default_sampling_params() == SamplingParams()
    with pytest.raises(ValueError, match='generation_config must be "auto" or "none"'):
        make_llm(path, generation_config="vllm")


def test_nan_logits_are_counted_in_outputs_and_metrics(checkpoint: Path, tmp_path: Path) -> None:
    path = shutil.copytree(checkpoint, tmp_path / "broken")
    weights = load_file(path / "model.safetensors")
    weights["lm_head.weight"][7] = torch.nan
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    with make_llm(path, count_nans_in_logits=True) as llm:
        [output] = llm.generate([5, 6, 7], GREEDY, use_tqdm=False)
        metrics = {metric.name: metric.value for metric in llm.get_metrics()}
    assert output.outputs[0].num_nans_in_logits == len(output.outputs[0].token_ids) == 12
    assert metrics["baton:num_nans_in_logits_total"] == 12
