"""Other clients read objects from answers, and choose which tools the model calls."""

from __future__ import annotations

import pytest

from support.clients.client_rig import ClientRig, by_word
from support.clients.weather_agent import called

TEXT = "It is cold."
ERROR = "colder than the absolute zero"
ADD = called("add", a=1, b=2)
OSLO = called("get_weather", city="Oslo")
MALMO = {"city": "Malmö", "degrees": 14}
MALMO_TEXT = '{"city": "Malmö", "degrees": 14}'
MALMO_CALL = called("Weather", **MALMO)


@pytest.mark.parametrize("model", ["openai/m", "anthropic/m"])
async def test_litellm_chooses_tools(clients: ClientRig, model: str) -> None:
    answers = {
        "auto": TEXT,
        "required": f"{OSLO}\n{ADD}",
        "named": ADD,
        "none": TEXT,
        "single": OSLO,
    }
    chosen = await clients.run("litellm_choices.py", model, script=by_word(answers))
    assert chosen == {
        "auto": {"content": TEXT, "calls": []},
        "required": {"content": "", "calls": ["get_weather", "add"]},
        "named": {"content": "", "calls": ["add"]},
        "none": {"content": TEXT, "calls": []},
        "single": {"content": "", "calls": ["get_weather"]},
    }
    auto, required, named, none, single = range(5)
    assert clients.allows(auto, f"{OSLO}\n{ADD}")
    assert not clients.allows(required, TEXT)
    assert not clients.allows(named, OSLO)
    assert "[add]" not in clients.prompts[none]
    assert not clients.allows(single, f"{OSLO}\n{ADD}")


@pytest.mark.parametrize("how", ["whole", "streamed"])
@pytest.mark.parametrize("api", ["chat", "responses"])
async def test_openai_on_node_chooses_tools(clients: ClientRig, api: str, how: str) -> None:
    answers = {
        "auto": TEXT,
        "required": f"{OSLO}\n{ADD}",
        "named": ADD,
        "none": TEXT,
        "single": OSLO,
    }
    chosen = await clients.run("openai_choices.mjs", api, how, script=by_word(answers))
    assert chosen == {
        "auto": [],
        "required": ["get_weather", "add"],
        "named": ["add"],
        "none": [],
        "single": ["get_weather"],
    }
    _, required, named, none, single = range(5)
    assert not clients.allows(required, TEXT)
    assert not clients.allows(named, OSLO)
    assert "[add]" not in clients.prompts[none]
    assert not clients.allows(single, f"{OSLO}\n{ADD}")


async def test_langchain_reads_objects_and_chooses_tools(clients: ClientRig) -> None:
    answers = {
        "function_calling": MALMO_CALL,
        "json_schema": MALMO_TEXT,
        "json_mode": MALMO_TEXT,
        "auto": TEXT,
        "any": MALMO_CALL,
        "Weather": MALMO_CALL,
        "none": TEXT,
    }
    read = await clients.run("langchain_structured.py", script=by_word(answers))
    for api in ("chat", "responses"):
        for method in ("function_calling", "json_schema", "json_mode"):
            assert read[f"{api} {method}"] == MALMO
        for choice, names in {"auto": [], "any": ["Weather"], "Weather": ["Weather"]}.items():
            assert read[f"{api} {choice}"] == names
        assert read[f"{api} none"] == []


@pytest.mark.parametrize(
    ("mode", "is_call"),
    [
        ("TOOLS", True),
        ("TOOLS_STRICT", True),
        ("RESPONSES_TOOLS", True),
        ("JSON", False),
        ("JSON_SCHEMA", False),
        ("MD_JSON", False),
    ],
)
async def test_instructor_asks_again_until_an_object_is_valid(
    clients: ClientRig, mode: str, is_call: bool
) -> None:
    texts = [MALMO_TEXT.replace("14", "-1400"), MALMO_TEXT]
    calls = [called("Weather", **{**MALMO, "degrees": -1400}), MALMO_CALL]
    first, second = calls if is_call else texts

    def script(prompt: str) -> str:
        return second if ERROR in prompt else first

    assert await clients.run("instructor_extract.py", mode, script=script) == MALMO
    _, repeated = clients.prompts
    assert repeated.count(ERROR) == 1
    if mode not in ("MD_JSON", "JSON"):
        assert not clients.allows(0, TEXT)


@pytest.mark.parametrize("mode", ["TOOLS", "RESPONSES_TOOLS"])
async def test_instructor_reads_objects_as_they_arrive(clients: ClientRig, mode: str) -> None:
    answers = {
        "partial": called("PartialWeather", **MALMO),
        "iterable": called("IterableWeather", tasks=[MALMO, MALMO]),
        "parallel": f"{MALMO_CALL}\n{called('Sum', kind='sum', a=1, b=2)}",
    }
    read = await clients.run("instructor_streams.py", mode, script=by_word(answers))
    assert read.pop("num_steps") > 2
    assert read == {
        "partial": MALMO,
        "iterable": [MALMO, MALMO],
        "parallel": [MALMO, {"kind": "sum", "a": 1, "b": 2}],
    }


@pytest.mark.parametrize("how", ["whole", "streamed"])
@pytest.mark.parametrize("api", ["compatible", "chat", "responses"])
async def test_the_ai_sdk_reads_an_object_after_calls_and_chooses_tools(
    clients: ClientRig, api: str, how: str
) -> None:
    answers = {
        "object": called("get_weather", city="Malmö"),
        "14": MALMO_TEXT,
        "auto": TEXT,
        "required": OSLO,
        "named": OSLO,
        "none": TEXT,
        "single": OSLO,
    }
    read = await clients.run("ai_output.mjs", api, how, script=by_word(answers))
    assert read["output"] == MALMO
    one = ["get_weather"]
    assert read["chosen"] == {"auto": [], "required": one, "named": one, "none": [], "single": one}
    _, answer, auto, required, named, none, single = range(7)
    assert not clients.allows(answer, TEXT)
    assert clients.allows(auto, TEXT)
    assert clients.allows(required, f"{OSLO}\n{OSLO}")
    for number in (required, named, single):
        assert not clients.allows(number, TEXT)
    assert "[get_weather]" not in clients.prompts[none]
    assert not clients.allows(single, f"{OSLO}\n{OSLO}")
