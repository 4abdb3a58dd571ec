"""Exchanges that are larger than the buffers in shared memory."""

from __future__ import annotations

import pytest
import torch

from baton_engine.distributed.shared_memory_group import BUFFER_NBYTES
from support.engine.ranks.group_ranks import (
    KINDS,
    Ranks,
    check_all_to_all,
    random_rows,
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2, 4])
def test_all_to_all_can_exceed_the_shared_memory_buffers(kind: str, size: int) -> None:
    ranks = Ranks(kind, size)
    groups = ranks.join()
    for counts in (
        [[5 * BUFFER_NBYTES + 7] + [1] * (size - 1)] * size,  # one rank gets nearly all
        [[BUFFER_NBYTES] * size] + [[0] * size] * (size - 1),  # one rank has all
        [
            [BUFFER_NBYTES // 2 + source + target for target in range(size)]
            for source in range(size)
        ],
        [[(BUFFER_NBYTES - 64) // (size - 1)] * size] * size,  # just fits
        [[(BUFFER_NBYTES - 64) // (size - 1) + 1] * size] * size,  # just does not fit
    ):
        rows = [random_rows((sum(counts[rank]),), torch.uint8, rank) for rank in range(size)]
        check_all_to_all(ranks, groups, rows, counts)
    ranks.each(lambda rank: groups[rank].close())
    ranks.close()
