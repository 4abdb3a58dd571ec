"""X-Request-Id: the id of a request in its response and in the log lines about it."""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Awaitable, Callable
from contextvars import ContextVar

from aiohttp import web

REQUEST_ID_HEADER = "X-Request-Id"

#: Without spaces, quotes and brackets, which would be ambiguous in log lines.
_VALID = re.compile(r"[\w.:=+/@-]{1,128}", re.ASCII)
_REQUEST_ID = web.RequestKey("request_id", str)
#: Id of the request that the current task serves. Empty if the task serves no request.
_current: ContextVar[str] = ContextVar("request_id", default="")


def request_id(request: web.BaseRequest) -> str:
    """Return the request's X-Request-Id, or a new id if the header is missing or invalid.

    A valid header has 1 to 128 characters, each an ASCII letter, a digit or one of `_.:=+/@-`.
    """
    if _REQUEST_ID not in request:
        sent = request.headers.get(REQUEST_ID_HEADER, "")
        request[_REQUEST_ID] = sent if _VALID.fullmatch(sent) else uuid.uuid4().hex
    return request[_REQUEST_ID]


@web.middleware
async def log_request_id(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Call `handler`, and add the request's id to the log lines of the handler and its tasks."""
    token = _current.set(request_id(request))
    try:
        return await handler(request)
    finally:
        _current.reset(token)


class LogFormatter(logging.Formatter):
    """Formats a log record as text, with the request's id in brackets before the message."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(request)s%(message)s")

    def format(self, record: logging.LogRecord) -> str:
        current = _current.get()
        record.request = f"[{current}] " if current else ""
        return super().format(record)
