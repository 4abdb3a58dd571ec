"""The data of a transfer, cut into pieces."""

from __future__ import annotations

import numpy as np

from baton_kv_transfer.transports.iovec import pack
from baton_kv_transfer.transports.ucx.data_messages import PIECE_BYTES, Pieces
from support.kv_transfer.transport_rig import rows

MIB_WORDS = 2**17


def test_rows_of_equal_lengths_are_split_equally_into_pieces_of_at_most_512_kib() -> None:
    words = np.zeros(8 * MIB_WORDS, dtype=np.int64)
    runs = [
        (0, 3 * MIB_WORDS + 5),
        *[(3 * MIB_WORDS + 10 + 2 * i, 1) for i in range(3000)],
        (4 * MIB_WORDS, MIB_WORDS),
    ]
    pieces = Pieces(pack(rows(words, *runs)))
    sizes = [pieces[i].nbytes for i in range(len(pieces))]
    assert sum(sizes) == 8 * sum(count for _, count in runs)
    assert max(sizes) == PIECE_BYTES
    elsewhere = Pieces(pack(rows(np.zeros(8 * MIB_WORDS, dtype=np.int64), *runs)))
    assert [elsewhere[i].nbytes for i in range(len(elsewhere))] == sizes
