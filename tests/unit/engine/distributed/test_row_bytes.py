"""An all_to_all of rows as one of bytes."""

from __future__ import annotations

import pytest
import torch

from baton_engine.distributed.row_bytes import row_bytes


def test_counts_of_rows_become_counts_of_bytes() -> None:
    rows = torch.arange(12, dtype=torch.bfloat16).view(3, 4).t()  # not contiguous
    found = row_bytes(rows, [1, 3], [2, 0], 2)
    assert (found.send_nbytes, found.recv_nbytes) == ([6, 18], [12, 0])
    assert torch.equal(found.source.view(torch.bfloat16).view(4, 3), rows)
    assert found.received.shape == (2, 3)
    found.target.copy_(found.source[:12])
    assert torch.equal(found.received, rows[:2])


@pytest.mark.parametrize(("send", "recv"), [([1, 2], [1, 1]), ([4], [4]), ([2, 2], [4])])
def test_counts_that_do_not_fit_are_refused(send: list[int], recv: list[int]) -> None:
    with pytest.raises(ValueError, match="all_to_all of 4 rows among 2 ranks"):
        row_bytes(torch.zeros(4, 3), send, recv, 2)
