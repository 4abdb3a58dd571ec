"""Encode and decode frames of SPDY/3.1, which kubectl uses for port-forward.

The module does no input and output. The specification is "SPDY Protocol - Draft 3.1" of the
Chromium project. SETTINGS and WINDOW_UPDATE are skipped, because kubectl has no flow control: its
side sends no WINDOW_UPDATE, and ignores those that it receives.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TypeAlias

#: Maximum length of a frame in bytes, without its 8 bytes of header.
MAX_FRAME = 2**20
#: Maximum size of a decompressed header block in bytes.
MAX_HEADERS = 2**16
#: Status of a RstStream whose sender does not need the stream any more.
CANCEL = 5

_VERSION = 3
_CONTROL = 0x8000
_STREAM_ID = 0x7FFFFFFF
_FIN = 0x01

_NAMES = (
    "options head post put delete trace accept accept-charset accept-encoding accept-language "
    "accept-ranges age allow authorization cache-control connection content-base content-encoding "
    "content-language content-length content-location content-md5 content-range content-type date "
    "etag expect expires from host if-match if-modified-since if-none-match if-range "
    "if-unmodified-since last-modified location max-forwards pragma proxy-authenticate "
    "proxy-authorization range referer retry-after server te trailer transfer-encoding upgrade "
    "user-agent vary via warning www-authenticate method get status"
)
_MORE_NAMES = "version HTTP/1.1 url public set-cookie keep-alive origin"
_WORDS = (
    "100101201202205206300302303304305306307402405406407408409410411412413414415416417502504505"
    "203 Non-Authoritative Information204 No Content301 Moved Permanently400 Bad Request"
    "401 Unauthorized403 Forbidden404 Not Found500 Internal Server Error501 Not Implemented"
    "503 Service UnavailableJan Feb Mar Apr May Jun Jul Aug Sept Oct Nov Dec 00:00:00 Mon, Tue, "
    "Wed, Thu, Fri, Sat, Sun, GMTchunked,text/html,image/png,image/jpg,image/gif,application/xml,"
    "application/xhtml+xml,text/plain,text/javascript,publicprivatemax-age=gzip,deflate,sdch"
    "charset=utf-8charset=iso-8859-1,utf-,*,enq=0."
)


def _sized(text: bytes) -> bytes:
    return struct.pack("!I", len(text)) + text


#: The zlib dictionary of section 2.6.10.1 of the specification.
DICTIONARY = (
    b"".join(_sized(entry.encode()) for entry in (*_NAMES.split(), "200 OK", *_MORE_NAMES.split()))
    + _WORDS.encode()
)


class SpdyError(Exception):
    """The received bytes are not valid SPDY/3.1, or exceed a limit."""


@dataclass(frozen=True)
class Headers:
    """A frame that adds headers to a stream.

    With `fin`, the sender sends nothing more on the stream.
    """

    stream: int
    headers: Mapping[str, str] = field(default_factory=dict)
    fin: bool = False


class SynStream(Headers):
    """A frame that opens a stream."""


class SynReply(Headers):
    """A frame that accepts a stream which the peer has opened."""


@dataclass(frozen=True)
class Data:
    """Bytes of a stream. With `fin`, the sender sends nothing more on the stream."""

    stream: int
    data: bytes
    fin: bool = False


@dataclass(frozen=True)
class RstStream:
    """A frame that ends a stream in both directions."""

    stream: int
    status: int


@dataclass(frozen=True)
class PingFrame:
    """A Ping frame, to which the receiver replies with a Ping of the same id."""

    id: int


@dataclass(frozen=True)
class GoAway:
    """A frame after which the sender accepts no streams with ids above `last_stream`."""

    last_stream: int
    status: int


class _Type(IntEnum):
    """Types of control frames."""

    SYN_STREAM = 1
    SYN_REPLY = 2
    RST_STREAM = 3
    PING = 6
    GOAWAY = 7
    HEADERS = 8


Frame: TypeAlias = SynStream | SynReply | Headers | Data | RstStream | PingFrame | GoAway


class FrameEncoder:
    """Encodes the frames of one direction. Encode frames in the order in which they are sent."""

    def __init__(self) -> None:
        self._zlib = zlib.compressobj(zdict=DICTIONARY)

    def encode(self, frame: Frame) -> bytes:
        """Return the bytes of `frame`.

        Raises:
            UnicodeEncodeError: a header is not Latin-1.
        """
        match frame:
            case Data(stream, data, fin):
                return struct.pack("!II", stream, (fin and _FIN) << 24 | len(data)) + data
            case SynStream(stream, headers, fin):
                # No associated stream, priority 0, no slot.
                body = struct.pack("!IIH", stream, 0, 0) + self._block(headers)
                return _control(_Type.SYN_STREAM, body, fin=fin)
            case Headers(stream, headers, fin):
                kind = _Type.SYN_REPLY if isinstance(frame, SynReply) else _Type.HEADERS
                return _control(kind, struct.pack("!I", stream) + self._block(headers), fin=fin)
            case RstStream(stream, status):
                return _control(_Type.RST_STREAM, struct.pack("!II", stream, status))
            case PingFrame(number):
                return _control(_Type.PING, struct.pack("!I", number))
            case GoAway(last, status):
                return _control(_Type.GOAWAY, struct.pack("!II", last, status))

    def _block(self, headers: Mapping[str, str]) -> bytes:
        pairs = [part.encode("latin-1") for pair in headers.items() for part in pair]
        block = struct.pack("!I", len(headers)) + b"".join(map(_sized, pairs))
        return self._zlib.compress(block) + self._zlib.flush(zlib.Z_SYNC_FLUSH)


def _control(kind: int, body: bytes, *, fin: bool = False) -> bytes:
    first = (_CONTROL | _VERSION) << 16 | kind
    return struct.pack("!II", first, (fin and _FIN) << 24 | len(body)) + body


class FrameDecoder:
    """Decodes the frames of one direction. The data may be cut into chunks at any byte."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._zlib = zlib.decompressobj(zdict=DICTIONARY)

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Yield the frames that `data` completes. Consume the iterator before the next call.

        Raises:
            SpdyError: the bytes are invalid. Do not use the decoder afterwards.
        """
        self._buffer += data
        while len(self._buffer) >= 8:
            first, second = struct.unpack_from("!II", self._buffer)
            length = second & 0xFFFFFF
            if length > MAX_FRAME:
                raise SpdyError(f"a frame of {length} bytes; the maximum is {MAX_FRAME}")
            if len(self._buffer) < 8 + length:
                return
            body = bytes(self._buffer[8 : 8 + length])
            del self._buffer[: 8 + length]
            fin = bool(second >> 24 & _FIN)
            if not first >> 31:
                yield Data(first, body, fin)
                continue
            if first >> 16 != _CONTROL | _VERSION:
                raise SpdyError(
                    f"SPDY version {first >> 16 & 0x7FFF}; only {_VERSION} is supported"
                )
            if (frame := self._control(first & 0xFFFF, body, fin)) is not None:
                yield frame

    def _control(self, kind: int, body: bytes, fin: bool) -> Frame | None:
        try:
            match kind:
                case _Type.SYN_STREAM:
                    return SynStream(_number(body) & _STREAM_ID, self._headers(body[10:]), fin)
                case _Type.SYN_REPLY:
                    return SynReply(_number(body) & _STREAM_ID, self._headers(body[4:]), fin)
                case _Type.HEADERS:
                    return Headers(_number(body) & _STREAM_ID, self._headers(body[4:]), fin)
                case _Type.RST_STREAM:
                    return RstStream(_number(body) & _STREAM_ID, _number(body, 4))
                case _Type.PING:
                    return PingFrame(_number(body))
                case _Type.GOAWAY:
                    return GoAway(_number(body) & _STREAM_ID, _number(body, 4))
        except (struct.error, zlib.error) as error:
            raise SpdyError(f"a malformed control frame of type {kind}: {error}") from error
        return None

    def _headers(self, compressed: bytes) -> dict[str, str]:
        block = self._zlib.decompress(compressed, MAX_HEADERS)
        if self._zlib.unconsumed_tail:
            raise SpdyError(f"a header block of more than {MAX_HEADERS} bytes")
        texts, position = [], 4
        for _ in range(2 * _number(block)):
            end = position + 4 + _number(block, position)
            if end > len(block):
                raise SpdyError("a header that exceeds its block")
            texts.append(block[position + 4 : end].decode("latin-1"))
            position = end
        return dict(zip(texts[::2], texts[1::2], strict=True))


def _number(data: bytes, offset: int = 0) -> int:
    return int(struct.unpack_from("!I", data, offset)[0])
