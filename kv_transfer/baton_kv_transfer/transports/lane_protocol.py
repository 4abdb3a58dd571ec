"""Frames that the two sides of a lane over sockets exchange: kinds, and requests for transfers."""

from __future__ import annotations

from baton_kv_transfer.transports.framed_socket import DATA
from baton_kv_transfer.transports.iovec import check

HELLO, READ, WRITE, NOTIF, ANSWER = range(DATA + 1, DATA + 6)
"""Kinds of messages. A frame's number names the transfer that it asks for, answers, or has bytes of."""
MAX_HELLO_BYTES = 4096


def encode_request(notif: bytes, iovec: bytes) -> bytes:
    return len(notif).to_bytes(4, "little") + notif + iovec


def decode_request(request: bytes) -> tuple[bytes, bytes]:
    """(notification, iovec).

    Raises:
        ValueError: not a request, without runs, or for more than one transfer may move.
    """
    end = 4 + int.from_bytes(request[:4], "little")
    iovec = request[end:]
    check(iovec)
    return request[4:end], iovec
