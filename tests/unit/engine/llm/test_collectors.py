"""Outputs that report a refusal or a failure."""

from __future__ import annotations

import pytest

from baton_engine.llm.collectors import check_output
from baton_protocol.engine_messages import EngineCoreOutput, ErrorCode, FinishReason


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (ErrorCode.INVALID, ValueError),
        (ErrorCode.LENGTH, ValueError),
        (ErrorCode.KV_LOAD, RuntimeError),
        (None, RuntimeError),
    ],
)
def test_an_error_names_the_prompt_and_only_that_of_the_caller_is_a_value_error(
    code: ErrorCode | None, error: type[Exception]
) -> None:
    output = EngineCoreOutput(
        "r", [], finish_reason=FinishReason.ERROR, error="too long", error_code=code
    )
    with pytest.raises(error, match=r"prompts\[3\]: too long"):
        check_output(output, "prompts[3]")
    check_output(EngineCoreOutput("r", [5]), "prompts[3]")
