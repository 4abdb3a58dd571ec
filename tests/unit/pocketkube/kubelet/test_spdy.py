"""Frames of SPDY/3.1."""

import contextlib
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pocketkube.kubelet import spdy
from pocketkube.kubelet.spdy import (
    Data,
    Frame,
    FrameDecoder,
    FrameEncoder,
    GoAway,
    Headers,
    PingFrame,
    RstStream,
    SpdyError,
    SynReply,
    SynStream,
)

ids = st.integers(0, 2**31 - 1)
words = st.integers(0, 2**32 - 1)
texts = st.text(st.characters(max_codepoint=255), max_size=30)
headers = st.dictionaries(texts, texts, max_size=4)
frames: st.SearchStrategy[list[Frame]] = st.lists(
    st.one_of(
        st.builds(SynStream, ids, headers, st.booleans()),
        st.builds(SynReply, ids, headers, st.booleans()),
        st.builds(Headers, ids, headers, st.booleans()),
        st.builds(Data, ids, st.binary(max_size=100), st.booleans()),
        st.builds(RstStream, ids, words),
        st.builds(PingFrame, words),
        st.builds(GoAway, ids, words),
    ),
    max_size=6,
)


def decode(*chunks: bytes) -> list[Frame]:
    decoder = FrameDecoder()
    return [frame for chunk in chunks for frame in decoder.feed(chunk)]


@given(frames, st.data())
def test_frames_are_decoded_from_bytes_that_are_cut_anywhere(
    sent: list[Frame], data: st.DataObject
) -> None:
    encoder = FrameEncoder()
    encoded = b"".join(map(encoder.encode, sent))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(encoded)), max_size=8)))
    chunks = [encoded[a:b] for a, b in zip([0, *cuts], [*cuts, len(encoded)], strict=True)]
    assert decode(*chunks) == sent


@given(st.binary(max_size=200), st.sampled_from(range(1, 12)))
def test_arbitrary_bytes_are_frames_or_an_error(body: bytes, kind: int) -> None:
    control = b"\x80\x03" + kind.to_bytes(2) + len(body).to_bytes(4) + body
    for received in (body, control):
        with contextlib.suppress(SpdyError):
            decode(received)


def test_the_bytes_of_frames_are_those_of_the_specification() -> None:
    encode = FrameEncoder().encode
    assert encode(Data(3, b"abc", fin=True)) == b"\0\0\0\3\1\0\0\3abc"
    assert encode(PingFrame(7)) == b"\x80\3\0\6\0\0\0\4\0\0\0\7"
    assert encode(RstStream(5, 1)) == b"\x80\3\0\3\0\0\0\x08\0\0\0\5\0\0\0\1"
    syn = encode(SynStream(1, {"port": "80"}, fin=True))
    assert syn[:18] == b"\x80\3\0\1\1\0\0" + bytes([len(syn) - 8]) + b"\0\0\0\1\0\0\0\0\0\0"
    block = zlib.decompressobj(zdict=spdy.DICTIONARY).decompress(syn[18:])
    assert block == b"\0\0\0\1\0\0\0\4port\0\0\0\x0280"


def test_the_dictionary_has_the_published_checksum() -> None:
    # zlib streams of SPDY/3 name their dictionary by this number.
    assert zlib.adler32(spdy.DICTIONARY) == 0xE3C6A7C2


def test_settings_and_window_updates_are_skipped() -> None:
    settings = b"\x80\3\0\4\0\0\0\x0c" + bytes(12)
    window_update = b"\x80\3\0\x09\0\0\0\x08" + bytes(8)
    ping = FrameEncoder().encode(PingFrame(1))
    assert decode(settings + window_update + ping) == [PingFrame(1)]


def test_frames_and_headers_above_the_limits_are_refused() -> None:
    too_long = b"\0\0\0\1\0" + (spdy.MAX_FRAME + 1).to_bytes(3)
    with pytest.raises(SpdyError, match="a frame of"):
        decode(too_long)
    bomb = FrameEncoder().encode(SynStream(1, {"x": "0" * spdy.MAX_HEADERS}))
    assert len(bomb) < 1000
    with pytest.raises(SpdyError, match="a header block of more than"):
        decode(bomb)
    with pytest.raises(SpdyError, match="version 2"):
        decode(b"\x80\2\0\6\0\0\0\4\0\0\0\1")
