"""Joins the KV connector reports of several workers into one report for the scheduler."""

from __future__ import annotations

from baton_kv_transfer.connector import ConnectorOutput, LoadResult


class OutputAggregator:
    """Combines the KV connector reports of all workers. Not thread-safe.

    Every worker holds a part of each KV block, so a transfer ends when it has ended on all workers.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        #: By transfer id: ranks that have released the blocks of the transfer.
        self._sent: dict[str, set[int]] = {}
        #: By transfer id and rank: results of loads that have not ended on all ranks.
        self._loaded: dict[str, dict[int, LoadResult]] = {}
        self._ended = ConnectorOutput()

    def add(self, rank: int, output: ConnectorOutput) -> bool:
        """Add one worker's report.

        Returns:
            Whether this report completes at least one transfer, which has now ended on all workers.
        """
        before = len(self._ended.finished_sending) + len(self._ended.load_results)
        for transfer_id in output.finished_sending:
            ranks = self._sent.setdefault(transfer_id, set())
            ranks.add(rank)
            if len(ranks) == self._world_size:
                del self._sent[transfer_id]
                self._ended.finished_sending.add(transfer_id)
        for transfer_id, result in output.load_results.items():
            results = self._loaded.setdefault(transfer_id, {})
            results[rank] = result
            if len(results) == self._world_size:
                del self._loaded[transfer_id]
                self._ended.load_results[transfer_id] = LoadResult(
                    min(part.num_valid_blocks for part in results.values()),
                    next((part.error for part in results.values() if part.error), ""),
                )
        return len(self._ended.finished_sending) + len(self._ended.load_results) > before

    def take(self) -> ConnectorOutput:
        """Return the transfers that have ended on all workers since the last call."""
        ended, self._ended = self._ended, ConnectorOutput()
        return ended
