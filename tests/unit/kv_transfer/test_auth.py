"""The proof that a peer has the token of the service."""

from __future__ import annotations

from typing import Any

import pytest

from baton_kv_transfer.auth import (
    CONSUMER,
    PRODUCER,
    compute_proof,
    derive_token,
    new_nonce,
    verify_proof,
)
from baton_protocol.service_key import ServiceKey

TOKEN = derive_token(ServiceKey(b"the key of this service"))
FIELDS: dict[str, Any] = {
    "consumer_nonce": new_nonce(),
    "producer_nonce": new_nonce(),
    "consumer_id": "c",
    "producer_id": "p",
}


def test_both_sides_compute_the_same_proof() -> None:
    token = derive_token(ServiceKey(b"the key of this service"))
    assert verify_proof(
        compute_proof(TOKEN, PRODUCER, **FIELDS), compute_proof(token, PRODUCER, **FIELDS)
    )


@pytest.mark.parametrize(
    "other",
    [
        {"consumer_nonce": new_nonce()},
        {"producer_nonce": new_nonce()},
        {"consumer_id": "d"},
        {"consumer_id": "cp", "producer_id": ""},
    ],
)
def test_a_proof_is_of_one_handshake(other: dict[str, Any]) -> None:
    ours = compute_proof(TOKEN, PRODUCER, **FIELDS)
    assert not verify_proof(ours, compute_proof(TOKEN, PRODUCER, **{**FIELDS, **other}))


def test_neither_the_proof_of_the_other_side_nor_of_another_token_is_valid() -> None:
    ours = compute_proof(TOKEN, PRODUCER, **FIELDS)
    assert not verify_proof(ours, compute_proof(TOKEN, CONSUMER, **FIELDS))
    for key in (None, ServiceKey(b"the key of another service")):
        assert not verify_proof(ours, compute_proof(derive_token(key), PRODUCER, **FIELDS))
