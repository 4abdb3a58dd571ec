"""Objects that Instructor reads while they are generated, and several calls in one answer.

python instructor_streams.py URL (openai | messages) (TOOLS | RESPONSES_TOOLS)
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import Literal

from instructor_client import create_client
from pydantic import BaseModel


class Weather(BaseModel):
    city: str
    degrees: int


class Sum(BaseModel):
    kind: Literal["sum"]
    a: int
    b: int


url, api, mode = sys.argv[1:]
client = create_client(url, api, mode)
parallel = create_client(url, api, "PARALLEL_TOOLS")


def says(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


steps = list(client.create_partial(model="m", response_model=Weather, messages=says("partial")))
items = list(client.create_iterable(model="m", response_model=Weather, messages=says("iterable")))
calls = parallel.create(
    model="m", response_model=Iterable[Weather | Sum], messages=says("parallel")
)
print(
    json.dumps(
        {
            "partial": steps[-1].model_dump(),
            "num_steps": len(steps),
            "iterable": [item.model_dump() for item in items],
            "parallel": [call.model_dump() for call in calls],
        }
    )
)
