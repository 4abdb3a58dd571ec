"""docs/reference/openai.md agrees with the gateway: routes, errors, fields and bounds."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from baton_text.request_error import RequestError
from baton_text.requests.chat_request import ChatCompletionRequest
from baton_text.requests.completion_request import CompletionRequest
from baton_text.requests.generation_request import GenerationRequest
from baton_text.requests.parsing import Checked, parse_request
from baton_text.requests.pooling_requests import EmbeddingRequest, RerankRequest
from baton_text.requests.responses_request import ResponsesRequest
from support.gateway.gateway_rig import GatewayRig
from support.install.rendered_chart import ROOT

PAGE = ROOT / "docs" / "reference" / "openai.md"
BODIES = {
    ChatCompletionRequest: {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
    CompletionRequest: {"model": "m", "prompt": "hi"},
    ResponsesRequest: {"model": "m", "input": "hi"},
    EmbeddingRequest: {"model": "m", "input": "hi"},
    RerankRequest: {"model": "m", "query": "hi", "documents": ["hello"]},
}
#: Fields without which a field has no effect.
NEEDS = {"top_logprobs": {"logprobs": True}, "length_penalty": {"use_beam_search": True}}
#: Pattern of a bound -> distance from its lower bound to the first refused integer.
BOUNDS = {
    r"(?P<low>-?\d+)\.\.(?P<high>[\d.]+)": 1,
    r"(?P<low>-?\d+) or more": 1,
    r"above (?P<low>\d+), at most (?P<high>\d+)": 0,
}


def check(page: Path) -> int:
    command = [sys.executable, "hack/openai_reference.py", str(page), "--check"]
    return subprocess.run(command, cwd=ROOT, timeout=120, check=False).returncode


def test_the_tables_are_generated_from_the_schemas(tmp_path: Path) -> None:
    assert check(PAGE) == 0
    stale = tmp_path / "openai.md"
    stale.write_text(PAGE.read_text().replace("| `top_k` | integer |", "| `top_k` | number |"))
    assert check(stale) == 1


async def test_every_route_is_documented(rig: GatewayRig) -> None:
    routes = [route for route in rig.gateway.app.router.routes() if route.method != "HEAD"]
    documented = re.findall(r"^\| ([A-Z]+) \| `(/\S*)` \|", PAGE.read_text(), re.MULTILINE)
    assert documented == [(route.method, route.resource.canonical) for route in routes]
    posted = [path for method, path in documented if method == "POST"]
    assert re.findall(r"^## (/\S+)$", PAGE.read_text(), re.MULTILINE) == posted


def test_every_status_and_code_of_an_error_is_documented() -> None:
    folders = (ROOT / "gateway", ROOT / "engine/baton_text")
    source = "".join(path.read_text() for folder in folders for path in folder.rglob("*.py"))
    statuses = set(re.findall(r"APIError\(\s*(\d{3}),", source))
    codes = set(re.findall(r'code(?:: str)?(?: = |=)"(\w+)"', source))
    assert {"429", "503"} < statuses
    assert {"service_unavailable", "unsupported_parameter"} < codes
    rows = re.findall(r"^\| (\d{3}) \| (.*?) \|", PAGE.read_text(), re.MULTILINE)
    assert {status for status, _ in rows} == statuses
    assert set(re.findall(r"`(\w+)`", " ".join(text for _, text in rows))) == codes


def bounded() -> list[tuple[str, str, str]]:
    """Return the name, the type and the bounds of each field with bounds that are numbers."""
    section = PAGE.read_text().partition("## /v1/chat")[2].partition("## ResponseFormat")[0]
    row = re.compile(r"^\| `(\w+)` \| ([^|]+) \| [^|]+ \| ([^|]+) \|", re.MULTILINE)
    return [
        (name, kind, bounds)
        for name, kind, bounds in row.findall(section)
        if any(re.fullmatch(pattern, bounds) for pattern in BOUNDS)
    ]


def refused(kind: Any, name: str, value: Any) -> str | None:
    """Return the field that the error of a request with this field names; None: it is valid."""
    body = BODIES[kind] | {name: value} | NEEDS.get(name, {})
    try:
        request = parse_request(msgspec.json.encode(body), kind)
        if isinstance(request, GenerationRequest):
            request.sampling_params(seed=0, max_tokens=5)
    except RequestError as error:
        return error.param
    return None


@pytest.mark.parametrize(("name", "type_", "bounds"), bounded())
def test_bounds_are_those_of_the_checks(name: str, type_: str, bounds: str) -> None:
    found = next(match for pattern in BOUNDS if (match := re.fullmatch(pattern, bounds)))
    outside = BOUNDS[found.re.pattern]
    limits = {side: int(float(text)) for side, text in found.groupdict().items()}
    kind: type[Checked] = CompletionRequest
    if name.startswith(("max_c", "top_l")):
        kind = ChatCompletionRequest
    elif name == "max_output_tokens":
        kind = ResponsesRequest
    elif name in ("dimensions", "top_n"):
        kind = EmbeddingRequest if name == "dimensions" else RerankRequest

    def problem(number: int) -> str | None:
        if field != name:
            return refused(kind, field, {"max_pattern_size": 1, name: number})
        return refused(kind, field, {"1": number} if type_.startswith("object") else number)

    field = "repetition_detection" if name in ("max_pattern_size", "min_count") else name
    assert problem(limits["low"] - outside) == field
    assert problem(limits["low"] + 1 - outside) is None
    if "high" in limits:
        assert problem(limits["high"]) is None
        assert problem(limits["high"] + 1) == field


def test_the_bounds_of_many_fields_are_compared() -> None:
    assert len(bounded()) >= 15
