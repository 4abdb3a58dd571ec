"""Other clients choose which tools the model calls, and read objects from answers."""

from __future__ import annotations

import pytest

from support.clients.choices import SCRIPT, TEXT, check_choices
from support.clients.client_rig import ClientRig, by_word
from support.clients.weather_agent import called

ERROR = "colder than the absolute zero"
MALMO = {"city": "Malmö", "degrees": 14}
MALMO_TEXT = '{"city": "Malmö", "degrees": 14}'
MALMO_CALL = called("Weather", **MALMO)


@pytest.mark.parametrize("how", ["whole", "streamed"])
@pytest.mark.parametrize(
    ("program", "arguments"),
    [
        ("litellm_choices.py", ["openai/m", "chat"]),
        ("litellm_choices.py", ["openai/m", "responses"]),
        ("litellm_choices.py", ["hosted_vllm/m", "chat"]),
        ("litellm_choices.py", ["anthropic/m", "chat"]),
        ("langchain_choices.py", ["chat"]),
        ("langchain_choices.py", ["responses"]),
        ("openai_choices.mjs", ["chat"]),
        ("openai_choices.mjs", ["responses"]),
        ("ai_choices.mjs", ["compatible"]),
        ("ai_choices.mjs", ["chat"]),
        ("ai_choices.mjs", ["responses"]),
        ("ai_choices.mjs", ["messages"]),
    ],
)
async def test_each_choice_of_tools(
    clients: ClientRig, program: str, arguments: list[str], how: str
) -> None:
    check_choices(clients, await clients.run(program, *arguments, how, script=SCRIPT))


async def test_langchain_reads_objects(clients: ClientRig) -> None:
    answers = {
        "function_calling": MALMO_CALL,
        "json_schema": MALMO_TEXT,
        "json_mode": MALMO_TEXT,
    }
    read = await clients.run("langchain_structured.py", script=by_word(answers))
    assert read == {f"{api} {method}": MALMO for api in ("chat", "responses") for method in answers}


@pytest.mark.parametrize(
    ("api", "mode", "is_call", "is_free"),
    [
        ("openai", "TOOLS", True, False),
        ("openai", "TOOLS_STRICT", True, False),
        ("openai", "RESPONSES_TOOLS", True, False),
        ("openai", "JSON", False, True),
        ("openai", "JSON_SCHEMA", False, False),
        ("openai", "MD_JSON", False, True),
        ("messages", "TOOLS", True, False),
        ("messages", "JSON", False, True),
    ],
)
async def test_instructor_asks_again_until_an_object_is_valid(
    clients: ClientRig, api: str, mode: str, is_call: bool, is_free: bool
) -> None:
    texts = [MALMO_TEXT.replace("14", "-1400"), MALMO_TEXT]
    calls = [called("Weather", **{**MALMO, "degrees": -1400}), MALMO_CALL]
    first, second = calls if is_call else texts

    def script(prompt: str) -> str:
        return second if ERROR in prompt else first

    assert await clients.run("instructor_extract.py", api, mode, script=script) == MALMO
    _, repeated = clients.prompts
    assert repeated.count(ERROR) == 1
    if not is_free:
        assert not clients.allows(0, TEXT)


@pytest.mark.parametrize(
    ("api", "mode"), [("openai", "TOOLS"), ("openai", "RESPONSES_TOOLS"), ("messages", "TOOLS")]
)
async def test_instructor_reads_objects_as_they_arrive(
    clients: ClientRig, api: str, mode: str
) -> None:
    answers = {
        "partial": called("PartialWeather", **MALMO),
        "iterable": called("IterableWeather", tasks=[MALMO, MALMO]),
        "parallel": f"{MALMO_CALL}\n{called('Sum', kind='sum', a=1, b=2)}",
    }
    read = await clients.run("instructor_streams.py", api, mode, script=by_word(answers))
    assert read.pop("num_steps") > 2
    assert read == {
        "partial": MALMO,
        "iterable": [MALMO, MALMO],
        "parallel": [MALMO, {"kind": "sum", "a": 1, "b": 2}],
    }


@pytest.mark.parametrize("how", ["whole", "streamed"])
@pytest.mark.parametrize("api", ["compatible", "chat", "responses", "messages"])
async def test_the_ai_sdk_reads_an_object_after_calls(
    clients: ClientRig, api: str, how: str
) -> None:
    """With /v1/messages, the SDK offers a tool `json` to models that it does not know."""

    def script(prompt: str) -> str:
        if "<|tool|>14" not in prompt:
            return called("get_weather", city="Malmö")
        return called("json", **MALMO) if "[json]" in prompt else MALMO_TEXT

    assert await clients.run("ai_output.mjs", api, how, script=script) == MALMO
    assert not clients.allows(1, TEXT)
    assert ("[json]" in clients.prompts[1]) == (api == "messages")
