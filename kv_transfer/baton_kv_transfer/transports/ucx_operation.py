"""What the progress thread works on: a posted batch of reads or writes."""

from __future__ import annotations

from collections import deque

from baton_kv_transfer.transports.transfer import Transfer
from baton_kv_transfer.transports.ucx_endpoints import Endpoint


class UCXOperation:
    """Touched by the progress thread only."""

    def __init__(self, transfer: Transfer, endpoint: Endpoint) -> None:
        """The transfer has the endpoint's access to memory, or the endpoint an error."""
        self.transfer = transfer
        self.endpoint = endpoint
        self.error = endpoint.error
        keys = [endpoint.rkeys[region] for region in transfer.regions.tolist()]
        lengths = transfer.local[:, 1].tolist()
        self.rows = list(
            zip(transfer.local[:, 0].tolist(), transfer.remote[:, 0].tolist(), lengths, keys, strict=True)
        )[::-1]
        """(local, remote, length, key), consumed from the end."""
        self.needs_flush = transfer.op == "WRITE"
        self.pending: deque[int] = deque()
        """Requests that UCX holds."""

    @property
    def running(self) -> bool:
        return bool(self.rows or self.pending or self.needs_flush)

    def stop(self) -> None:
        """Nothing more is posted; what is posted has to come back first."""
        self.rows, self.needs_flush = [], False

    def finish(self) -> None:
        self.endpoint.num_operations -= 1
        self.transfer.end(self.error)
