"""Parses request bodies, and refuses a body that would take long to parse.

The JSON library holds the GIL while it parses a body, so parsing in a thread would still block the
event loop. A megabyte of text takes a fraction of a millisecond. A megabyte of brackets takes a
thousand times as long. Therefore the JSON values of a large body are counted before the body is
parsed.
"""

from __future__ import annotations

import logging
from typing import TypeVar

from baton_gateway.http.body_budget import BodyCharge
from baton_gateway.metrics import GatewayMetrics
from baton_gateway.thread_pool import run_off_loop
from baton_text.json_values import STRING, count_punctuation, count_values
from baton_text.request_error import RequestError
from baton_text.requests.parsing import Checked, parse_request, unknown_fields

logger = logging.getLogger(__name__)

#: Limit on the JSON values of one body. A prompt may add max_model_len token ids to this limit. An
#: entry of an object counts as two values.
MAX_VALUES = 2**20
#: Limit on the arrays and objects of one body, which take the longest to parse.
MAX_CONTAINERS = 2**17
#: Bodies of up to this many bytes are parsed on the event loop, and their values are not counted.
#: Parsing them takes a few milliseconds at most.
INLINE_BODY_BYTES = 2**16
#: Memory of one JSON value as a Python object, in bytes. A short string takes 60.
VALUE_BYTES = 64
#: `bound_values` does not count the punctuation in the first strings of a body, up to this many.
#: Skipping a string takes a microsecond, so the punctuation of later strings counts as values.
MAX_SKIPPED_STRINGS = 256
#: Maximum number of names of unknown fields to log. Clients choose the names, so the log must be
#: bounded.
MAX_LOGGED_FIELDS = 100
#: Number of characters of an unknown field's name to log.
MAX_LOGGED_NAME_LENGTH = 64

_Request = TypeVar("_Request", bound=Checked)


class UnknownFields:
    """Counts unknown fields of request bodies.

    Each name is logged once, up to MAX_LOGGED_FIELDS names.
    """

    def __init__(self, metrics: GatewayMetrics) -> None:
        self._metrics = metrics
        self._logged: set[str] = set()

    def record(self, names: list[str]) -> None:
        self._metrics.unknown_body_fields.inc(len(names))
        for name in names[:MAX_LOGGED_FIELDS]:
            if len(self._logged) == MAX_LOGGED_FIELDS:
                return
            name = name[:MAX_LOGGED_NAME_LENGTH]
            if name not in self._logged:
                self._logged.add(name)
                logger.warning(
                    "a request has the unknown field %r, which is ignored; check its spelling",
                    name,
                )


async def parse_body(
    body: bytes,
    kind: type[_Request],
    max_model_len: int | None,
    unknown: UnknownFields,
    charge: BodyCharge,
) -> _Request:
    """Return the request of type `kind` that the JSON `body` contains.

    Fields that `kind` does not have are ignored and recorded in `unknown`. Before parsing, the
    estimated memory of the parsed values is added to `charge`. Short values may take 30 times the
    memory of their JSON.

    Raises:
        RequestError: the body is invalid or has too many values.
        APIError: 503, the memory budget for bodies is exhausted, and this request was refused.
    """

    def count() -> int:
        max_values = MAX_VALUES + (max_model_len or 0)
        if len(body) > INLINE_BODY_BYTES:
            check_values(body, max_values, MAX_CONTAINERS)
        return min(bound_values(body), max_values)

    def parse() -> tuple[_Request, list[str]]:
        return parse_request(body, kind), unknown_fields(body, kind)

    charge.add(VALUE_BYTES * await run_off_loop(count, len(body), INLINE_BODY_BYTES))
    request, names = await run_off_loop(parse, len(body), INLINE_BODY_BYTES)
    unknown.record(names)
    return request


def bound_values(body: bytes) -> int:
    """Return an upper bound of the number of JSON values inside the object or array `body`.

    The bound is the number of opening brackets, commas and colons in `body`. Characters in the
    first MAX_SKIPPED_STRINGS strings are not counted.
    """
    values = start = 0
    for _ in range(MAX_SKIPPED_STRINGS):
        quote = body.find(b'"', start)
        string = None if quote < 0 else STRING.match(body, quote)
        if string is None:
            break
        values += count_punctuation(body, start, quote)[0]
        start = string.end()
    return values + count_punctuation(body, start, len(body))[0]


def check_values(body: bytes, max_values: int, max_containers: int) -> None:
    """Raise RequestError if the JSON `body` has too many values.

    Args:
        max_values: limit on values of any type. An entry of an object counts as two values.
        max_containers: limit on arrays and objects.
    """
    values, containers = count_values(body, max_values, max_containers)
    for count, limit, name in (
        (values, max_values, "values"),
        (containers, max_containers, "arrays and objects"),
    ):
        if count > limit:
            raise RequestError(
                f"The body has more than {limit} {name}; send less at once",
                code="request_too_large",
            )
