"""Bodies of requests: read within the time there is, and parsed once it is sure that parsing does not take long.

The JSON library parses a body in one go and lets nobody else run meanwhile, also from a thread. A megabyte of text takes it a
fraction of a millisecond, a megabyte of brackets a thousand times as long: so values are counted before.
"""

from __future__ import annotations

import asyncio
import re
from typing import TypeVar

from aiohttp import ClientPayloadError, web
from aiohttp.http import HttpProcessingError

from baton_gateway.errors import APIError
from baton_gateway.workers import offload
from baton_text.errors import RequestError
from baton_text.parsing import Checked, parse_request

MAX_BODY_BYTES = 16 * 2**20
MAX_VALUES = 2**20
"""Numbers, strings and so on in one body; an entry of an object counts twice. A prompt of as many token ids as the model takes may
come on top."""
MAX_CONTAINERS = 2**17
"""Of these: arrays and objects, which take the longest."""
INLINE_BODY_BYTES = 2**16
"""Shorter bodies are parsed at once: that takes some milliseconds at worst."""

_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)

_Request = TypeVar("_Request", bound=Checked)


async def read_body(http: web.Request, deadline: float, timeout_s: float) -> bytes:
    """
    Args:
        deadline: on the event loop's clock.
        timeout_s: for the message: how long it had.

    Raises:
        APIError: the body does not come, or not as its headers say.
    """
    try:
        async with asyncio.timeout_at(deadline):
            return await http.read()
    except TimeoutError:
        raise APIError(
            408, f"The body did not arrive within {timeout_s:g} s.", code="timeout"
        ) from None
    except (web.RequestPayloadError, ClientPayloadError, HttpProcessingError) as error:
        raise APIError(400, f"The body cannot be read: {error}", code="invalid_body") from error


async def parse_body(body: bytes, kind: type[_Request], max_model_len: int | None) -> _Request:
    """Raises RequestError: see `parse_request`; or there are more values in it than are taken."""

    def parse() -> _Request:
        if len(body) > INLINE_BODY_BYTES:
            check_values(body, MAX_VALUES + (max_model_len or 0), MAX_CONTAINERS)
        return parse_request(body, kind)

    return await offload(parse, len(body), INLINE_BODY_BYTES)


def check_values(body: bytes, most_values: int, most_containers: int) -> None:
    """Raises RequestError: the JSON of `body` has more values, or more arrays and objects."""
    values, containers = _count(body, 0, len(body))
    if values <= most_values and containers <= most_containers:
        return
    # The same characters in texts are no values.
    values = containers = start = 0
    while values <= most_values and containers <= most_containers:
        quote = body.find(b'"', start)
        found = _count(body, start, len(body) if quote < 0 else quote)
        values, containers = values + found[0], containers + found[1]
        string = None if quote < 0 else _STRING.match(body, quote)
        if string is None:  # the end, or no JSON
            break
        start = string.end()
    for count, most, name in (
        (values, most_values, "values"),
        (containers, most_containers, "arrays and objects"),
    ):
        if count > most:
            raise RequestError(
                f"The body has more than {most} {name}; send less at once", code="request_too_large"
            )


def _count(body: bytes, start: int, end: int) -> tuple[int, int]:
    """(values, arrays and objects) by the marks that stand before them."""
    containers = body.count(b"[", start, end) + body.count(b"{", start, end)
    return containers + body.count(b",", start, end) + body.count(b":", start, end), containers
