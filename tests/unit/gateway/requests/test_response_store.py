"""The store of conversations: its limits, the clients that share it, and references to items."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from baton_gateway.errors import APIError
from baton_gateway.requests.response_store import (
    CLIENT_SHARE,
    MAX_CONVERSATION_BYTES,
    MAX_REFERENCES,
    ResponseStore,
    new_item_id,
)
from baton_text.chat_messages import ChatMessage
from baton_text.responses.responses_api import OutputItem, Response


def response_of(number: int, size: int) -> Response:
    return Response(
        id=f"resp_{number}",
        created_at=0,
        model="m",
        status="completed",
        output=[],
        instructions="x" * size,
    )


def is_kept(store: ResponseStore, number: int, client: str | None) -> bool:
    try:
        return bool(store.get(f"resp_{number}", client))
    except APIError:
        return False


def test_a_store_forgets_the_oldest_responses_of_a_client_with_too_many() -> None:
    store = ResponseStore(max_bytes=100_000)
    message = [ChatMessage(role="user", content="hi")]
    store.put(response_of(0, 1000), message, "b")
    for number in range(1, 100):
        store.put(response_of(number, 1000), message, "a")
    kept = [number for number in range(100) if is_kept(store, number, "a")]
    assert kept == list(range(100 - len(kept), 100))
    assert 100_000 / CLIENT_SHARE / 4000 < len(kept) < 100_000 / CLIENT_SHARE / 2000
    assert is_kept(store, 0, "b")


def test_a_store_is_bounded_over_all_clients() -> None:
    store = ResponseStore(max_bytes=100_000)
    for number in range(1000):
        store.put(response_of(number, 1000), [], f"client-{number}")
    kept = [number for number in range(1000) if is_kept(store, number, f"client-{number}")]
    assert kept == list(range(1000 - len(kept), 1000))
    assert 20 < len(kept) < 50


def test_a_response_that_is_too_large_is_not_kept() -> None:
    store = ResponseStore(max_bytes=100_000)
    store.put(response_of(0, 50_000), [], "a")
    store.put(response_of(1, 200_000), [], None)
    with pytest.raises(APIError, match="is not stored here"):
        store.earlier("resp_0", [], "a")
    assert not is_kept(store, 1, None)
    store.put(response_of(2, 50_000), [], None)
    assert is_kept(store, 2, None)
    store = ResponseStore()
    store.put(response_of(3, MAX_CONVERSATION_BYTES), [], None)
    assert not is_kept(store, 3, None)


def test_a_store_is_used_by_several_threads() -> None:
    store = ResponseStore(max_bytes=100_000)

    def use(client: int) -> None:
        for number in range(2000):
            store.put(response_of(number, 500), [], f"client-{client % 2}")
            is_kept(store, number, "client-0")
            with suppress(APIError):
                store.delete(f"resp_{number - 3}", f"client-{client % 2}")

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(use, range(8)))
    for client in (0, 1):
        for number in range(2000):
            with suppress(APIError):
                store.delete(f"resp_{number}", f"client-{client}")
    assert store.num_bytes == 0


def test_references_to_items_of_too_long_responses_are_refused() -> None:
    store = ResponseStore()
    size = MAX_CONVERSATION_BYTES // 2
    for number in range(2):
        response = response_of(number, size)
        item_id = new_item_id("msg", response.id, 0)
        response.output = [OutputItem(type="message", id=item_id, status="completed", content=[])]
        store.put(response, [], None)
    ids = [new_item_id("msg", f"resp_{number}", 0) for number in range(2)]
    for item_id in ids:
        assert store.earlier(None, [item_id], None)
    with pytest.raises(APIError, match="more than"):
        store.earlier(None, ids, None)


def test_many_references_to_items_are_refused() -> None:
    store = ResponseStore()
    store.put(response_of(0, 100), [], None)
    ids = [f"msg_0_{number}" for number in range(MAX_REFERENCES + 1)]
    assert store.earlier(None, ids[1:], None)
    with pytest.raises(APIError, match="references to items") as refused:
        store.earlier(None, ids, None)
    assert refused.value.status == 400


def test_a_long_id_of_an_item_is_refused_without_searching_it() -> None:
    """An id of 16 MiB took some tenths of a second."""
    times: list[float] = []
    for length in (2**10, 2**25):
        started = time.thread_time()
        with pytest.raises(APIError, match="is not stored here"):
            ResponseStore().earlier(None, ["a_" + "_" * length + "!"], None)
        times.append(time.thread_time() - started)
    assert times[1] < times[0] + 0.2
