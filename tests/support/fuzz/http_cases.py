"""Random HTTP requests: bodies, headers, paths, methods, framing and compression.

For the fuzz tests of HTTP ports.
"""

from __future__ import annotations

import functools
import gzip
import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from support.fuzz.mutations import encode_json, mutate_bytes, mutate_value

METHODS = ("GET", "POST", "PUT", "HEAD", "OPTIONS", "DELETE", "PATCH", "TRACE", "get", "X" * 300)
ODD_PATHS = (
    *(
        "/",
        "*",
        "//",
        "/..",
        "/%00",
        "/%zz",
        "/v1/models/%ff",
        "/v1/models/../x",
        "http://x/health",
        "http://[/health",
        "http://[::1/is_paused?x=1",
    ),
    *(
        "/v1/" + "a" * 9000,
        "/?" + "&".join("a=1" for _ in range(500)),
        "/\x80",
        "/é",
        "/v1//models/",
    ),
)
#: Names and values of headers that requests have in addition.
ODD_HEADERS: Sequence[tuple[bytes, bytes]] = (
    (b"Host", b""),
    (b"Host", b"a\tb"),
    (b"Content-Length", b"-1"),
    (b"Content-Length", b"5, 5"),
    (b"Content-Length", b"99999999999999999999"),
    (b"Content-Length", b"0x10"),
    (b"Transfer-Encoding", b"chunked"),
    (b"Transfer-Encoding", b"gzip, chunked"),
    (b"Transfer-Encoding", b"identity"),
    (b"Transfer-Encoding", b"\x0bchunked"),
    *(
        (b"Expect", b"100-continue"),
        (b"Expect", b"x"),
        (b"Upgrade", b"h2c"),
        (b"Connection", b"Upgrade"),
    ),
    (b"Connection", b"close"),
    (b"Connection", b"keep-alive, close"),
    (b"Range", b"bytes=0-"),
    (b"Content-Encoding", b"br"),
    (b"Content-Encoding", b"zstd"),
    (b"Content-Encoding", b"gzip"),
    (b"Content-Type", b"multipart/form-data; boundary=x"),
    (b"Content-Type", b";" * 200),
    (b"Content-Type", b"application/json; charset=utf-7"),
    (b"Content-Type", b"\xff"),
    (b"Accept-Encoding", b"gzip"),
    (b"Authorization", b"Bearer " + b"k" * 5000),
    *(
        (b"Authorization", b"Bearer \xff\xfe"),
        (b"Authorization", b"Basic Og=="),
        (b"Authorization", b""),
        (b"Authorization", b"Baton-Signature 1:" + b"0" * 64),
        (b"Authorization", b"Baton-Signature " + b"9" * 5000 + b":"),
    ),
    (b"Cookie", b"a" * 4000),
    (b"X-Request-Id", b"\x7f"),
    (b"X-Request-Id", b"i" * 500),
    *(
        (b"X-Data-Parallel-Rank", b"0"),
        (b"X-Data-Parallel-Rank", b"\xd9\xa3"),
        (b"Origin", b"null"),
    ),
    *(
        (b"Origin", b"https://x"),
        (b"Access-Control-Request-Method", b"POST"),
        (b"Sec-WebSocket-Key", b"x"),
    ),
    *(
        (b"A" * 200, b"b" * 9000),
        (b"Bad Name", b"x"),
        (b"", b"x"),
        (b"X\x00", b"x"),
        (b"X", b"a\x00b"),
    ),
    *(
        (b"Content-Length\t", b"3"),
        (b" Folded", b"x"),
        (b"Forwarded", b'for="[::1"'),
        (b"TE", b"trailers"),
    ),
)


@dataclass
class HTTPCase:
    """Bytes to send over a new connection."""

    parts: list[bytes]
    #: Number of responses that the server must send. 0: the server may also wait for more bytes or
    #: close the connection.
    num_responses: int
    #: Close the connection with a reset, without reading.
    resets: bool = False


class HTTPCases:
    """Makes the cases for one server.

    Args:
        bodies: path and valid JSON body of each POST endpoint; None for an endpoint without a body.
        paths: paths of GET endpoints.
        headers: headers that valid requests have, such as the API key.
    """

    def __init__(
        self,
        bodies: Sequence[tuple[str, str, Any]],
        paths: Sequence[str],
        headers: Sequence[tuple[bytes, bytes]] = (),
    ) -> None:
        self._bodies = bodies
        self._paths = paths
        self._headers = list(headers)

    def make(self, rng: random.Random) -> HTTPCase:
        kind = rng.random()
        if kind < 0.5:
            return HTTPCase([self._valid(rng)], 1)
        if kind < 0.58:
            return self._chunked(rng)
        if kind < 0.66:
            return self._compressed(rng)
        if kind < 0.74:
            count = rng.choice((2, 3, 8))
            return HTTPCase([b"".join(self._valid(rng, b"") for _ in range(count))], count)
        if kind < 0.86:
            return HTTPCase([self._odd_head(rng)], 0)
        whole = self._valid(rng)
        if kind < 0.90:
            at = rng.randrange(len(whole))
            return HTTPCase([whole[:at]], 0, resets=rng.random() < 0.5)
        if kind < 0.92:
            return HTTPCase([whole], 0, resets=True)
        if kind < 0.94:
            at = rng.randrange(len(whole))
            return HTTPCase([whole[:at], whole[at:]], 1)
        if kind < 0.99:
            return HTTPCase([mutate_bytes(whole, rng)], 0)
        return HTTPCase([rng.randbytes(rng.choice((1, 20, 3000, 100_000)))], 0)

    def _body(self, rng: random.Random) -> tuple[str, str, bytes]:
        method, path, value = rng.choice(self._bodies)
        if value is None:
            return method, path, b""
        kind = rng.random()
        if kind < 0.1:
            return method, path, encode_json(value)
        body = encode_json(mutate_value(value, rng, rounds=rng.choice((1, 1, 1, 2, 4))))
        return method, path, mutate_bytes(body, rng) if kind > 0.85 else body

    def _valid(self, rng: random.Random, last: bytes | None = None) -> bytes:
        """Return a request whose HTTP is valid. Its body may be anything.

        Args:
            rng: source of the choices.
            last: value of the header Connection; None: close. Empty: no such header.
        """
        if rng.random() < 0.15:
            path = rng.choice(self._paths)
            return _request("GET", path, [*self._headers, *_connection(last)], b"")
        method, path, body = self._body(rng)
        length = [(b"Content-Length", str(len(body)).encode())]
        kind = b"application/json" if rng.random() < 0.95 else b"text/plain"
        headers = [*self._headers, (b"Content-Type", kind), *length, *_connection(last)]
        return _request(method, path, headers, body)

    def _chunked(self, rng: random.Random) -> HTTPCase:
        method, path, body = self._body(rng)
        size = rng.choice((1, 7, 1000)) if len(body) < 2000 else 1000
        pieces = [body[at : at + size] for at in range(0, len(body), size)]
        framed = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
        is_damaged = rng.random() < 0.6
        if is_damaged:
            framed = mutate_bytes(framed, rng)
        headers = [
            *self._headers,
            *((b"Content-Type", b"application/json"), (b"Transfer-Encoding", b"chunked")),
            *_connection(None),
        ]
        return HTTPCase([_request(method, path, headers, framed)], 0 if is_damaged else 1)

    def _compressed(self, rng: random.Random) -> HTTPCase:
        method, path, body = self._body(rng)
        encoding = rng.choice((b"gzip", b"deflate"))
        packed = gzip.compress(body, 1) if encoding == b"gzip" else zlib.compress(body, 1)
        kind = rng.random()
        if kind < 0.1:
            packed = _bomb(encoding, 64 * 2**20)
        elif kind < 0.5:
            packed = mutate_bytes(packed, rng)
        elif kind < 0.6:
            packed = rng.randbytes(rng.choice((0, 1, 50, 5000)))
        headers = [
            *self._headers,
            *((b"Content-Type", b"application/json"), (b"Content-Encoding", encoding)),
            (b"Content-Length", str(len(packed)).encode()),
            *_connection(None),
        ]
        return HTTPCase([_request(method, path, headers, packed)], 1)

    def _odd_head(self, rng: random.Random) -> bytes:
        method, path, body = self._body(rng)
        if rng.random() < 0.5:
            method = rng.choice(METHODS)
        if rng.random() < 0.5:
            path = rng.choice((*ODD_PATHS, *self._paths))
        headers = [(b"Content-Length", str(len(body)).encode())] if rng.random() < 0.7 else []
        if rng.random() < 0.7:
            headers += self._headers
        headers += rng.sample(ODD_HEADERS, rng.choice((0, 1, 1, 2, 5)))
        if rng.random() < 0.05:
            headers += [(b"X-%d" % number, b"v") for number in range(rng.choice((50, 200, 2000)))]
        rng.shuffle(headers)
        version = rng.choice(
            (b"HTTP/1.1",) * 6 + (b"HTTP/1.0", b"HTTP/2.0", b"HTTP/9", b"", b"ICY")
        )
        return _request(method, path, headers, body, version)


def _connection(value: bytes | None) -> list[tuple[bytes, bytes]]:
    return [] if value == b"" else [(b"Connection", value or b"close")]


def _request(
    method: str,
    path: str,
    headers: Sequence[tuple[bytes, bytes]],
    body: bytes,
    version: bytes = b"HTTP/1.1",
) -> bytes:
    lines = [b"%s: %s\r\n" % header for header in headers]
    line = b" ".join((method.encode(), path.encode("latin-1"), version))
    return line + b"\r\nHost: fuzz\r\n" + b"".join(lines) + b"\r\n" + body


@functools.cache
def _bomb(encoding: bytes, nbytes: int) -> bytes:
    """Return compressed zeros, about a thousandth of `nbytes` long."""
    zeros = bytes(nbytes)
    return gzip.compress(zeros, 9) if encoding == b"gzip" else zlib.compress(zeros, 9)
