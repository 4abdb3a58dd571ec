"""Objects that Instructor reads from texts, in one of its modes.

python instructor_extract.py URL (openai | messages) MODE
"""

from __future__ import annotations

import json
import sys

from instructor_client import create_client
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


client = create_client(*sys.argv[1:])
messages = [{"role": "user", "content": "It is 14 degrees in Malmö."}]
weather = client.create(model="m", response_model=Weather, messages=messages, max_retries=2)
print(json.dumps(weather.model_dump()))
