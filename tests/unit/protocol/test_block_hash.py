"""Block hashes: equal hashes mean equal prefixes, models and salts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baton_protocol.block_hash import hash_block, root_hash
from support.engine.scheduling.block_hashes import hash_blocks

TOKENS = st.lists(st.integers(0, 200_000), max_size=70)


@given(TOKENS, TOKENS, st.integers(1, 20))
def test_equal_block_hashes_mean_equal_prefixes(a, b, block_size) -> None:
    root = root_hash("model")
    for i, (x, y) in enumerate(
        zip(hash_blocks(root, a, block_size), hash_blocks(root, b, block_size), strict=False)
    ):
        end = (i + 1) * block_size
        assert (x == y) == (a[:end] == b[:end])


def test_only_full_blocks_are_hashed_and_the_partial_one_differs_from_the_full() -> None:
    root = root_hash("model")
    assert len(hash_blocks(root, list(range(47)), 16)) == 2
    assert hash_block(root, [1, 2]) != hash_block(root, [1, 2, 0])


def test_model_and_salt_separate_caches() -> None:
    roots = {root_hash("a"), root_hash("b"), root_hash("a", "salt"), root_hash("as", "alt")}
    assert len(roots) == 4
