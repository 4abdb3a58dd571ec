"""The offline API on a tiny checkpoint: its outputs against transformers, and its errors."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tqdm import tqdm

from baton_engine import LLM, BeamSearchParams, SamplingParams, StructuredOutputsParams
from baton_engine.core.engine_core import EngineCore
from baton_engine.llm.collectors import SamplesCollector
from baton_protocol.engine_messages import EngineCoreOutput
from baton_protocol.process.fatal import ConfigurationError
from baton_protocol.sampling_params import StructuredOutput, StructuredOutputKind
from support.hostile.attack import Attack, parametrize
from support.hostile.configs import CONFIG_ATTACKS
from support.hostile.templates import LOOPS
from support.hostile.tokenizers import DEFAULTS_ATTACKS, TEXT_ATTACKS
from support.hostile.weights import INDEX_ATTACKS
from support.parity import assert_greedy, prompts, reference_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def make_llm(checkpoint: Path, **args) -> LLM:
    return LLM(
        checkpoint,
        **{"dtype": "float32", "num_blocks": 96, "device": "cpu", "num_threads": 1, **args},
    )


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    with make_llm(checkpoint, max_model_len=512) as llm:
        yield llm


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> torch.nn.Module:
    return reference_model(checkpoint)


def test_the_import_of_the_package_does_not_import_torch() -> None:
    code = (
        "import sys, baton_engine; from baton_engine import SamplingParams; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


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


def test_prompts_with_lower_priority_numbers_run_first(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[list[int]] = []
    push = SamplesCollector.push

    def record(self: SamplesCollector, output: EngineCoreOutput) -> bool:
        has_ended = push(self, output)
        if has_ended:
            ended.append(self.prompt.token_ids)
        return has_ended

    monkeypatch.setattr(SamplesCollector, "push", record)
    with make_llm(checkpoint, max_num_seqs=1) as llm:
        llm.generate([[1, 2], [3, 4], [5, 6]], GREEDY, priority=[2, 0, 1])
        assert ended == [[3, 4], [5, 6], [1, 2]]
        with pytest.raises(ValueError, match="got 1 for 2"):
            llm.generate([[1, 2], [3, 4]], GREEDY, priority=[2])
    with (
        make_llm(checkpoint, scheduling_policy="fcfs") as llm,
        pytest.raises(ValueError, match="priority has no effect"),
    ):
        llm.generate([[1, 2]], GREEDY, priority=[0])


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


def metric(llm: LLM, name: str) -> float:
    return next(item.value for item in llm.get_metrics() if item.name == name)


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


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (SamplingParams(n=0), "n must be"),
        (SamplingParams(n=3, best_of=2), "best_of must be at least n=3"),
        (SamplingParams(temperature=-1), "temperature"),
        (SamplingParams(stop=[""]), "stop must not"),
        (SamplingParams(bad_words=[" "]), "bad_words"),
        (SamplingParams(beam_width=2), "beam_search"),
        (
            SamplingParams(structured_output=StructuredOutput(StructuredOutputKind.REGEX, "a")),
            "set structured_outputs",
        ),
        (SamplingParams(stop_token_ids=[5000]), "stop_token_ids"),
        (
            SamplingParams(structured_outputs=StructuredOutputsParams(regex="a", choice=["b"])),
            "structured_outputs",
        ),
        (SamplingParams(structured_outputs=StructuredOutputsParams(regex="(")), "regex"),
        (
            SamplingParams(structured_outputs=StructuredOutputsParams()),
            "structured_outputs must have one of",
        ),
        (
            SamplingParams(structured_outputs=StructuredOutputsParams(choice="yes")),
            "structured_outputs.choice: .*got str",
        ),
        (
            SamplingParams(structured_outputs={"regex": "a"}),
            "structured_outputs: expected StructuredOutputsParams, got dict",
        ),
        (
            SamplingParams(structured_outputs=StructuredOutputsParams(json=print)),
            "structured_outputs: ",
        ),
        (SamplingParams(logprobs=True), "logprobs: expected int"),
        (SamplingParams(top_k=2.5), "top_k: expected int, got float"),
        (SamplingParams(temperature="hot"), "temperature: expected float, got str"),
        (SamplingParams(n=1.5), "n: expected int, got float"),
        (SamplingParams(stop=[5]), r"stop\[0\]: expected str, got int"),
        (SamplingParams(stop={"a"}), "stop: expected a list, got a set"),
        (SamplingParams(bad_words="one"), "bad_words: expected array"),
        (
            SamplingParams(bad_words=["word"] * 600),
            "bad_words must have at most 512 words, got 600",
        ),
        (SamplingParams(logit_bias={"7": 1.0}), "logit_bias: expected int, got str"),
    ],
)
def test_invalid_sampling_params_are_refused_by_name_and_leave_no_request(
    llm: LLM, params: SamplingParams, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        llm.generate(["good", "bad"], [GREEDY, params], use_tqdm=False)
    assert metric(llm, "baton:num_requests_running") == 0
    assert metric(llm, "baton:num_requests_waiting") == 0


def test_invalid_prompts_are_refused_with_their_index(llm: LLM) -> None:
    with pytest.raises(ValueError, match=r"prompt 1.*\b600\b"):
        llm.generate([[5], [5] * 600], GREEDY, use_tqdm=False)
    with pytest.raises(ValueError, match="prompt 0 is empty"):
        llm.generate([""], GREEDY, use_tqdm=False)
    with pytest.raises(TypeError, match="prompt 0 must be a text"):
        llm.generate([3.5], GREEDY, use_tqdm=False)
    with pytest.raises(TypeError, match=r"prompt 1 .*a list with bool"):
        llm.generate([[5], [True]], GREEDY, use_tqdm=False)
    with pytest.raises(
        TypeError, match="prompt 0 must have prompt or prompt_token_ids, got 'text'"
    ):
        llm.generate({"text": "hello"}, GREEDY, use_tqdm=False)
    with pytest.raises(ValueError, match=r"prompt 0: .*character 2 is half of a surrogate pair"):
        llm.generate("hi\ud800", GREEDY, use_tqdm=False)
    for wrong in (None, 5, b"hello", {"hello"}):
        with pytest.raises(TypeError, match="prompts must be a text, a list"):
            llm.generate(wrong, GREEDY, use_tqdm=False)
    with pytest.raises(
        TypeError, match="sampling_params must be SamplingParams or a list of them, got dict"
    ):
        llm.generate("hello", {"temperature": 0}, use_tqdm=False)
    with pytest.raises(TypeError, match="params must be BeamSearchParams, got SamplingParams"):
        llm.beam_search("hello", GREEDY)
    assert llm.generate("still there", GREEDY, use_tqdm=False)[0].finished


def test_invalid_conversations_are_refused(llm: LLM) -> None:
    user = {"role": "user", "content": "hello"}
    for wrong, kind, message in (
        ("hello", TypeError, "messages must be a list"),
        (user, TypeError, "messages must be a list"),
        ([[user], []], ValueError, "conversation 1 is empty"),
        (["hello"], TypeError, "conversation 0 must be a list of messages"),
    ):
        with pytest.raises(kind, match=message):
            llm.chat(wrong, GREEDY, use_tqdm=False)
    with pytest.raises(ValueError, match="chat_template_kwargs must not set messages"):
        llm.chat([user], GREEDY, use_tqdm=False, chat_template_kwargs={"messages": []})


@parametrize(
    [*INDEX_ATTACKS[::9], *CONFIG_ATTACKS[::16], *TEXT_ATTACKS[::12], *DEFAULTS_ATTACKS[::6]]
)
def test_a_hostile_checkpoint_is_refused_with_the_file_in_the_message(
    checkpoint: Path, tmp_path: Path, attack: Attack
) -> None:
    path = Path(shutil.copytree(checkpoint, tmp_path / "model"))
    attack.apply(path)
    with pytest.raises((ConfigurationError, ValueError)) as caught:
        make_llm(path)
    assert str(path) in str(caught.value)
    assert attack.message in str(caught.value)


def test_a_hostile_chat_template_ends_with_a_reason(llm: LLM) -> None:
    user = {"role": "user", "content": "hello"}
    for template, message in ((LOOPS, "CPU time"), ("{{ 'a' * 10 ** 11 }}", "of memory")):
        with pytest.raises(ValueError, match=message):
            llm.chat([user], GREEDY, use_tqdm=False, chat_template=template)
    assert llm.chat([user], GREEDY, use_tqdm=False)[0].finished


def test_arguments_are_fields_of_the_engines_configuration(llm: LLM, checkpoint: Path) -> None:
    assert (llm.config.cache.num_blocks, llm.config.model.max_model_len) == (96, 512)
    with pytest.raises(TypeError, match=r"no argument 'num_block'; there are .*num_blocks"):
        make_llm(checkpoint, num_block=3)
    with pytest.raises(ValueError, match="max_num_seqs must be at least 1, got 0"):
        make_llm(checkpoint, max_num_seqs=0)
    with pytest.raises(ValueError, match="num_blocks"):
        make_llm(checkpoint, num_blocks="many")


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


def test_generate_on_a_closed_llm_is_an_error(checkpoint: Path) -> None:
    with make_llm(checkpoint) as llm:
        pass
    llm.close()
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate("hello")


def test_sleep_and_wake_up_do_not_change_the_output(llm: LLM) -> None:
    [before] = llm.generate("hello", GREEDY, use_tqdm=False)
    llm.sleep(1)
    with pytest.raises(RuntimeError, match="wake_up"):
        llm.generate("hello", GREEDY)
    llm.wake_up()
    [after] = llm.generate("hello", GREEDY, use_tqdm=False)
    assert after.outputs[0].token_ids == before.outputs[0].token_ids


def test_a_repeated_prompt_comes_from_the_prefix_cache(llm: LLM) -> None:
    llm.reset_prefix_cache()
    ids = [list(range(3, 50))]
    counts = [llm.generate(ids, GREEDY, use_tqdm=False)[0].num_cached_tokens for _ in range(2)]
    assert counts == [0, 32]


def test_the_progress_bar_counts_prompts_and_estimates_speed(
    llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    llm.generate(["a", "b", "c"], GREEDY)
    shown = capsys.readouterr().err
    assert "Processed prompts" in shown
    assert "3/3" in shown
    assert "toks/s, output: " in shown
    bars: list[tqdm] = []

    def make(**options) -> tqdm:
        bars.append(tqdm(**options, disable=True))
        return bars[0]

    llm.generate(["a", "b"], GREEDY, use_tqdm=make)
    assert len(bars) == 1


def test_ctrl_c_aborts_running_requests_and_the_llm_can_be_used_again(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = 0
    step = EngineCore.step

    def interrupted_step(core: EngineCore) -> list[EngineCoreOutput]:
        nonlocal steps
        steps += 1
        if steps == 3:
            signal.raise_signal(signal.SIGINT)
        return step(core)

    monkeypatch.setattr(llm._model.core, "step_fn", lambda: interrupted_step(llm._model.core))
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["hello"] * 4, SamplingParams(max_tokens=300, ignore_eos=True), use_tqdm=False)
    assert 3 <= steps < 10
    monkeypatch.undo()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert metric(llm, "baton:num_requests_running") == 0
    assert llm.generate("hello", GREEDY, use_tqdm=False)[0].finished


def test_generate_can_be_called_by_several_threads_at_once(llm: LLM) -> None:
    results: dict[int, list[int]] = {}

    def work(index: int) -> None:
        results[index] = llm.generate("hello", GREEDY, use_tqdm=False)[0].outputs[0].token_ids

    threads = [threading.Thread(target=work, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(results) == 3
    assert len({tuple(ids) for ids in results.values()}) == 1


def test_a_failed_engine_is_reported_and_refuses_later_calls(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make_llm(checkpoint) as llm:

        def fail() -> None:
            raise OSError("the device is on fire")

        monkeypatch.setattr(llm._model.core, "step_fn", fail)
        with pytest.raises(RuntimeError, match="the device is on fire"):
            llm.generate("hello", use_tqdm=False)
        with pytest.raises(RuntimeError, match=r"failed earlier .*fire.*make a new LLM"):
            llm.generate("hello", use_tqdm=False)
