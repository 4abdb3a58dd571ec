"""Checks that every agent makes before a transfer."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from baton_kv_transfer.agent.agent import INIT_AGENT, DlistHandle, XferHandle
from baton_kv_transfer.agent.descriptors import check_pairs, select
from baton_kv_transfer.transports.transfer import Descriptors, XferState


def check_post(handle: XferHandle) -> None:
    """Check that the handle may be posted now.

    Raises:
        ValueError: the handle was released, or its last post has not ended.
    """
    if handle.released:
        raise ValueError("the transfer was released: make it again")
    if handle.state is XferState.PROC:
        raise ValueError("the transfer is still active: post it again after DONE or ERR")


def select_pairs(
    operation: str,
    local: DlistHandle,
    ours: NDArray[np.int64],
    remote: DlistHandle,
    theirs: NDArray[np.int64],
) -> tuple[Descriptors, Descriptors]:
    """Return the rows with the indices `ours` in `local` and `theirs` in `remote`, [n, 3] each.

    Raises:
        ValueError: rows do not exist or cannot be paired, or a list was released or is of the
            wrong side.
    """
    if local.released or remote.released:
        raise ValueError("a descriptor list of this transfer was released: prepare it again")
    if local.agent or not remote.agent:
        raise ValueError(
            f"local_xfer_side must be prepared for {INIT_AGENT}, remote_xfer_side for a peer"
        )
    rows = select(local.descs.rows, ours), select(remote.descs.rows, theirs)
    check_pairs(operation, *rows)
    return rows


def unknown_peer_error(name: str) -> KeyError:
    return KeyError(f"agent {name} is not known: add_remote_agent(its metadata) first")
