"""Objects that LangChain reads from texts, with each of its methods.

python langchain_structured.py URL
"""

from __future__ import annotations

import json
import sys

from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field


class Weather(BaseModel):
    """The weather of a city."""

    city: str = Field(description="Name of the city")
    degrees: int | None = None


[url] = sys.argv[1:]
printed = {}
for api in ("chat", "responses"):
    model = ChatOpenAI(
        base_url=f"{url}/v1", api_key="unused", model="m", use_responses_api=api == "responses"
    )
    for method in ("function_calling", "json_schema", "json_mode"):
        reader = model.with_structured_output(Weather, method=method)
        weather = reader.invoke(f"Write {method} as JSON: 14 degrees in Malmö.")
        printed[f"{api} {method}"] = weather.model_dump()
print(json.dumps(printed))
