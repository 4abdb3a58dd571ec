"""Sends responses to clients that may not read them.

A client that stops reading must not keep its response in the gateway's memory.
"""

from __future__ import annotations

import asyncio
import logging

from aiohttp import web

from baton_gateway.access.api_keys import client_name
from baton_gateway.http.body_budget import BodyCharge

logger = logging.getLogger(__name__)

#: Maximum number of outputs of a choice that may wait for a client. So many outputs take an engine
#: at least a minute. They take half a megabyte of memory without log-probabilities.
MAX_UNREAD_OUTPUTS = 4096
#: Maximum number of log-probabilities of a request that may wait for a client: about 30 MB.
MAX_UNREAD_LOGPROBS = 2**20
#: Up to this many bytes fit into the buffer of a connection.
BUFFERED_BYTES = 2**16
#: Upper bound on the bytes of the name of an event and of the head of its chunk.
MAX_EVENT_HEAD = 2**10


def has_unread_bytes(http: web.Request) -> bool:
    """Return whether bytes sent to the client wait in the connection's buffer."""
    return http.transport is not None and http.transport.get_write_buffer_size() > 0


def fits_into_buffer(http: web.Request, num_bytes: int) -> bool:
    """Return whether an event of `num_bytes` fits into the connection's buffer.

    If the event fits, sending it does not wait for the client.
    """
    if http.transport is None or http.protocol.writing_paused:
        return False
    return http.transport.get_write_buffer_size() + num_bytes + MAX_EVENT_HEAD < BUFFERED_BYTES


def abort_connection(http: web.Request, name: str) -> None:
    """Close the connection now, and drop the bytes that are buffered for the client.

    Args:
        http: the request.
        name: text that identifies the request in the log, such as `request chatcmpl-1`.
    """
    if http.transport is not None and not http.transport.is_closing():
        logger.warning(
            "%s%s: the client does not read its response, closing the connection",
            name,
            client_name(http),
        )
        http.transport.abort()


def abort_if_unread(
    http: web.Request, name: str, num_choices: int, num_outputs: int, num_logprobs: int
) -> None:
    """Close the connection if too many outputs wait for a client that does not read.

    The connection stays open if the client has read all bytes that were sent. In that case, the
    gateway is slow, and not the client.

    Args:
        http: the request.
        name: text that identifies the request in the log, such as `request chatcmpl-1`.
        num_choices: number of choices of the request.
        num_outputs: number of outputs that wait to be sent.
        num_logprobs: number of log-probabilities in these outputs.
    """
    is_long = num_outputs > MAX_UNREAD_OUTPUTS * num_choices or num_logprobs > MAX_UNREAD_LOGPROBS
    if is_long and has_unread_bytes(http):
        abort_connection(http, name)


async def send_json(
    http: web.Request, body: bytes, timeout_s: float, charge: BodyCharge | None = None
) -> web.StreamResponse:
    """Return a response with the JSON `body`, after sending it if `body` is large.

    A large body has more than BUFFERED_BYTES. Its request counts as in flight while the response is
    sent. If sending takes longer than `timeout_s`, the client is disconnected. With a smaller body,
    aiohttp sends the returned response.

    Args:
        charge: counts the bytes of a large response. None if the bytes of `body` are already
            counted, or if `body` is one object that all responses share.
    """
    if len(body) <= BUFFERED_BYTES:
        return web.Response(body=body, content_type="application/json")
    if charge is not None:
        charge.add_response(len(body))
    response = web.StreamResponse()
    response.content_type, response.content_length = "application/json", len(body)
    try:
        async with asyncio.timeout(timeout_s):
            await response.prepare(http)
            # In pieces, because the transport copies the bytes that it cannot send at once.
            for start in range(0, len(body), BUFFERED_BYTES):
                await response.write(memoryview(body)[start : start + BUFFERED_BYTES])
            await response.write_eof()
    except ConnectionError:
        logger.info("%s%s: the client disconnected", http.path, client_name(http))
    except TimeoutError:
        abort_connection(http, http.path)
    except asyncio.CancelledError:  # for example, other requests need the budget
        abort_connection(http, http.path)
        raise
    return response
