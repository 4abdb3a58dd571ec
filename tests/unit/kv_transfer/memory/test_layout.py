"""Ranges of KV heads, and layouts that can exchange blocks."""

from __future__ import annotations

import msgspec
import pytest

from baton_kv_transfer.memory.layout import HeadRange, KVCacheLayout, explain_layout_mismatch

LAYOUT = KVCacheLayout(
    num_blocks=8, num_kv_heads=2, num_layers=3, block_size=4, head_dim=16, dtype="bfloat16"
)


@pytest.mark.parametrize(
    ("one", "other", "common"),
    [
        ((0, 4), (2, 4), (2, 2)),
        ((2, 2), (0, 8), (2, 2)),
        ((0, 2), (2, 2), (2, 0)),
        ((4, 2), (0, 2), (4, 0)),
    ],
)
def test_the_overlap_is_the_same_from_both_sides(
    one: tuple[int, int], other: tuple[int, int], common: tuple[int, int]
) -> None:
    assert HeadRange(*one).overlap(HeadRange(*other)) == HeadRange(*common)
    assert HeadRange(*other).overlap(HeadRange(*one)).count == common[1]


def test_sizes_count_keys_and_values_of_all_layers() -> None:
    assert LAYOUT.head_nbytes == 3 * 2 * 4 * 16 * 2
    assert LAYOUT.block_nbytes == 2 * LAYOUT.head_nbytes
    assert msgspec.structs.replace(LAYOUT, dtype="float32").head_nbytes == 2 * LAYOUT.head_nbytes


def test_a_worker_without_other_workers_has_all_heads_of_the_model() -> None:
    assert (LAYOUT.num_model_heads, LAYOUT.heads) == (2, HeadRange(0, 2))
    part = msgspec.structs.replace(LAYOUT, first_kv_head=4, total_kv_heads=8)
    assert (part.num_model_heads, part.heads) == (8, HeadRange(4, 2))


def test_layouts_may_differ_in_blocks_and_heads_of_the_worker_only() -> None:
    ours = msgspec.structs.replace(LAYOUT, total_kv_heads=8)
    for same in (
        {"num_blocks": 99},
        {"num_kv_heads": 4, "first_kv_head": 4},
    ):
        assert explain_layout_mismatch(ours, msgspec.structs.replace(ours, **same)) == ""
    for field, value in {
        "name": "HNL2BD",
        "dtype": "float16",
        "num_layers": 5,
        "block_size": 8,
        "head_dim": 32,
    }.items():
        text = explain_layout_mismatch(ours, msgspec.structs.replace(ours, **{field: value}))
        assert text == (
            f"KV layouts differ in {field}: {getattr(ours, field)} here, {value} at the peer"
        )
    assert "num_model_heads: 8 here, 2 at the peer" in explain_layout_mismatch(ours, LAYOUT)
