"""The values of the store: limits on keys, values and bytes."""

from __future__ import annotations

import pytest
from torch._C._distributed_c10d import Store
from torch.distributed import DistStoreError

from baton_engine.distributed.store import values as store_values


def test_a_request_with_thousands_of_keys_is_refused(store: Store) -> None:
    store.set("key", "x" * 10_000)
    for count in (2_000, store_values.MAX_KEYS_AT_ONCE + 1):
        with pytest.raises(
            DistStoreError, match=r"refused Get.*(the values have|a request has at most)"
        ):
            store.multi_get(["key"] * count)
    with pytest.raises(DistStoreError, match="a request has at most"):
        store.check(["key"] * (store_values.MAX_KEYS_AT_ONCE + 1))
    assert store.multi_get(["key"] * 1_000) == [b"x" * 10_000] * 1_000


def test_the_numbers_of_keys_and_bytes_are_limited(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_values, "MAX_KEYS", 3)
    monkeypatch.setattr(store_values, "MAX_BYTES", 1000)
    store.multi_set(["a", "b", "c"], ["1", "1", "x" * 900])
    with pytest.raises(DistStoreError, match="the store is full: it holds 3 keys"):
        store.set("d", "1")
    for call in (lambda: store.append("a", "x" * 100), lambda: store.set("b", "x" * 100)):
        with pytest.raises(DistStoreError, match="the store is full: it holds 1000 bytes"):
            call()
    store.set("c", "x" * 800)
    store.append("a", "x" * 100)
    assert store.delete_key("c")
    store.set("d", "x" * 800)
    assert store.multi_get(["a", "b"]) == [b"1" + b"x" * 100, b"1"]


def test_the_length_of_a_value_is_limited(store: Store) -> None:
    store.set("key", "x" * 2**19)
    with pytest.raises(DistStoreError, match="values have at most"):
        store.append("key", "x" * (2**19 + 1))
    store.set("number", "9" * 5000)
    with pytest.raises(DistStoreError, match="is not a number"):
        store.add("number", 1)
