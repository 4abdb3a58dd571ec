"""Requests that the owner of the memory refuses or ignores."""

from __future__ import annotations

import numpy as np
import pytest

from baton_kv_transfer.transports.iovec import pack
from baton_kv_transfer.transports.transfer import XferState
from baton_kv_transfer.transports.ucx import messages
from baton_kv_transfer.transports.ucx.connection import UCXConnection
from baton_kv_transfer.transports.ucx.data_messages import PIECE_BYTES
from support.kv_transfer.transport_rig import WORDS, end, rows
from support.kv_transfer.ucx_rig import Raw, UCXTransportHere
from support.waiting import eventually

MIB_WORDS = 2**17


def test_a_request_with_an_invalid_row_is_refused_and_leaves_no_receive(
    pair: tuple[UCXTransportHere, UCXTransportHere],
) -> None:
    one, owner = pair
    elsewhere = np.zeros(MIB_WORDS, dtype=np.int64)
    for op in ("READ", "WRITE"):
        remote = np.concatenate(
            [rows(owner.words, (0, MIB_WORDS)), rows(elsewhere, (0, MIB_WORDS))]
        )
        state, error = end(
            one.post(
                op, "owner", rows(one.words, (0, MIB_WORDS), (MIB_WORDS, MIB_WORDS)), remote, b"n"
            )
        )
        assert state is XferState.ERR
        assert "1 of 2 descriptors are outside the memory registered there" in error
    assert owner.context.num_refused == 2
    assert not elsewhere.any()
    assert not owner.notifs
    eventually(lambda: not one.num_held() and not owner.num_held(), "nothing is held")
    some = rows(one.words, (0, 8))
    assert end(one.post("READ", "owner", some, rows(owner.words, (8, 8))))[0] is XferState.DONE


@pytest.mark.parametrize("num_words", [8, 8000, MIB_WORDS])
def test_a_refused_write_of_any_length_ends_while_others_continue(
    pair: tuple[UCXTransportHere, UCXTransportHere], num_words: int
) -> None:
    one, owner = pair
    elsewhere = np.zeros(num_words, dtype=np.int64)
    write = one.post(
        "WRITE", "owner", rows(one.words, (0, num_words)), rows(elsewhere, (0, num_words))
    )

    def ended() -> bool:
        some = one.post("READ", "owner", rows(one.words, (0, 8)), rows(owner.words, (8, 8)))
        assert end(some)[0] is XferState.DONE
        return write.state is not XferState.PROC

    eventually(ended, "the refusal", timeout_s=5)
    assert "outside the memory registered there" in end(write)[1]


@pytest.mark.parametrize(
    "hello", ["none", "wrong secret", "garbage", "invalid UTF-8", "deep", "no message"]
)
def test_a_peer_without_the_secret_is_ignored(
    connections: list[UCXConnection],
    pair: tuple[UCXTransportHere, UCXTransportHere],
    raw: Raw,
    hello: str,
) -> None:
    one, owner = pair
    if hello == "wrong secret":
        raw.send_message(messages.UCXHello(b"0" * 16, raw.session, "raw", raw.worker.address))
    elif hello == "garbage":
        raw.send(messages.CONTROL_TAG, b"\xc1" * 100_000)
    elif hello == "invalid UTF-8":
        no_text = messages.UCXHello(owner.address.secret, raw.session, "raw", raw.worker.address)
        raw.send(messages.CONTROL_TAG, messages.encode(no_text).replace(b"raw", b"\xff\xfe\xfd"))
    elif hello == "deep":
        raw.send(messages.CONTROL_TAG, b"\x91" * 60_000 + b"\xc0")
    elif hello == "no message":
        raw.send(messages.CONTROL_TAG + 1, b"x" * 1000)
    raw.send_message(messages.Write(raw.session, 7, pack(rows(owner.words, (0, 8))), b"n", True))
    raw.send_message(messages.Notif(raw.session, b"hello"))
    raw.wait("all was sent", lambda: len(raw.sent) >= 2)
    one.transport.send_notif("owner", b"me")
    eventually(lambda: owner.notifs, "a message of a real peer")
    assert owner.notifs == [("one", b"me")]
    assert raw.worker.address not in [connection.address for connection in connections]
    np.testing.assert_array_equal(owner.words, np.arange(WORDS))


def test_unexpected_data_is_discarded(
    pair: tuple[UCXTransportHere, UCXTransportHere], raw: Raw
) -> None:
    one, owner = pair
    for piece in range(50):
        raw.send(messages.data_tag(1, piece), b"x" * (PIECE_BYTES if piece % 2 else 100))
    raw.wait("all was taken", lambda: len(raw.sent) == 50)
    eventually(lambda: not owner.num_held(), "nothing is held")
    assert (
        end(one.post("READ", "owner", rows(one.words, (0, 8)), rows(owner.words, (8, 8))))[0]
        is XferState.DONE
    )


def test_invalid_requests_are_refused_or_ignored(
    pair: tuple[UCXTransportHere, UCXTransportHere], raw: Raw
) -> None:
    owner = pair[1]
    raw.send_hello(owner)
    for iovec in (
        b"",
        b"x" * 15,
        pack(np.array([[8, -1, 0]])),
        pack(np.array([[2**62, 2**61, 0]])),
    ):
        raw.send_message(messages.Read(raw.session, 1, iovec))
    raw.wait("all were refused", lambda: len(raw.received) == 4)
    assert all(isinstance(answer, messages.UCXRefused) for answer in raw.received)
    for message in (
        messages.Go(raw.session, 1),
        messages.Done(raw.session, 1),
        messages.UCXRefused(raw.session, 1, "no"),
    ):
        raw.send_message(message)
    raw.send(
        messages.CONTROL_TAG,
        messages.encode(messages.Read(raw.session, -1, pack(rows(owner.words, (0, 8))))),
    )
    raw.send_message(messages.Notif(raw.session, b"still here"))
    raw.wait("the notification", lambda: owner.notifs == [("raw", b"still here")])


def test_a_piece_of_another_length_ends_the_connection(
    connections: list[UCXConnection], pair: tuple[UCXTransportHere, UCXTransportHere], raw: Raw
) -> None:
    owner = pair[1]
    raw.send_hello(owner)
    raw.send_message(messages.Write(raw.session, 5, pack(rows(owner.words, (0, 100))), b"n", True))
    raw.wait("the owner's receives", lambda: raw.received == [messages.Go(raw.session, 5)])
    raw.send(messages.data_tag(5, 0), b"x" * 400)
    raw.wait("the end of the connection", lambda: connections[0].error)
    assert not owner.notifs
