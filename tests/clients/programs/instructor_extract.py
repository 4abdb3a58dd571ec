"""Objects that Instructor reads from texts, in one of its modes.

python instructor_extract.py URL MODE
"""

from __future__ import annotations

import json
import sys

import instructor
from openai import OpenAI
from pydantic import BaseModel, field_validator


class Weather(BaseModel):
    city: str
    degrees: int

    @field_validator("degrees")
    @classmethod
    def is_possible(cls, degrees: int) -> int:
        if degrees < -273:
            raise ValueError("colder than the absolute zero")
        return degrees


url, mode = sys.argv[1:]
client = instructor.from_openai(
    OpenAI(base_url=f"{url}/v1", api_key="unused"), mode=instructor.Mode[mode]
)
messages = [{"role": "user", "content": "It is 14 degrees in Malmö."}]
weather = client.create(model="m", response_model=Weather, messages=messages, max_retries=2)
print(json.dumps(weather.model_dump()))
