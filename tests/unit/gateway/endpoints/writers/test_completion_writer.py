"""The text offsets and the echo of a completion."""

from __future__ import annotations

from itertools import accumulate

import pytest

from baton_gateway.endpoints import stream_sender
from baton_protocol.engine_messages import TokenLogprobs
from baton_text.output import TextOutput
from baton_text.tokenizer import Tokenizer
from support.gateway.recorded_stream import PROMPT, RecordedStream, make_job, make_sender


@pytest.fixture
def stream() -> RecordedStream:
    return RecordedStream()


@pytest.fixture
def prompt_ids(tokenizer: Tokenizer) -> list[int]:
    return tokenizer.encode(PROMPT)


def logprobs_of(token_ids: list[int]) -> list[TokenLogprobs]:
    return [TokenLogprobs(token_id, -0.5, 1, [(token_id, -0.5)]) for token_id in token_ids]


@pytest.mark.parametrize("inline_entries", [0, 1024])
@pytest.mark.parametrize("echo", [False, True])
async def test_the_offsets_of_each_choice_count_the_echoed_prompt_and_its_own_tokens(
    tokenizer: Tokenizer,
    stream: RecordedStream,
    prompt_ids: list[int],
    monkeypatch: pytest.MonkeyPatch,
    echo: bool,
    inline_entries: int,
) -> None:
    monkeypatch.setattr(stream_sender, "INLINE_ENTRIES", inline_entries)
    job = make_job(prompt_ids, num_choices=2, echo=echo, logprobs=1)
    answers = [tokenizer.encode(text) for text in (" the quick brown fox", " fox")]
    sender = make_sender(job, stream, tokenizer)
    await sender.begin()
    for step in range(max(map(len, answers))):
        for choice, answer in zip(job.choices, answers, strict=True):
            token_ids = answer[step : step + 1]
            output = TextOutput(tokenizer.decode(token_ids), token_ids, logprobs_of(token_ids))
            if echo and step == 0:
                output.prompt_logprobs = logprobs_of(prompt_ids[1:])
            await sender.send_output(choice, output)
            assert output.prompt_logprobs is None
    await sender.end()
    for index, answer in enumerate(answers):
        logprobs = [choice["logprobs"] for choice in stream.choices(index)]
        texts = [tokenizer.token_text(token) for token in (prompt_ids if echo else []) + answer]
        assert [text for part in logprobs for text in part["tokens"]] == texts
        offsets = [0, *accumulate(map(len, texts))][:-1]
        assert [offset for part in logprobs for offset in part["text_offset"]] == offsets


async def test_an_echo_without_logprobs_comes_before_the_first_token(
    tokenizer: Tokenizer, stream: RecordedStream, prompt_ids: list[int]
) -> None:
    job = make_job(prompt_ids, echo=True)
    sender = make_sender(job, stream, tokenizer)
    await sender.begin()
    await sender.send_output(job.choices[0], TextOutput(" fox", [5]))
    await sender.end()
    assert [choice["text"] for choice in stream.choices(0)] == [PROMPT, " fox"]
    assert stream.last == b"[DONE]"
