"""A worker that records when KV transfers begin and end.

The worker writes one JSON line per event to the file $BATON_TRANSFER_TIMES. Times are those of the
monotonic clock, which all processes of a host share. The events are:

    handed   The producer's connector received the last blocks of a prompt. The step that computed
             the blocks still runs, or with $BATON_STEP_FIRST has ended.
    saved    The step that computed the last blocks has ended. The producer is about to send the
             step's token.
    loaded   The consumer's connector has verified the last block of a load.
    decoded  A step has begun that computes one token of the request. The request's prompt was
             loaded or computed before.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from baton_engine.executor.step import SchedulerOutput
from baton_engine.worker.worker import Worker
from baton_kv_transfer.connector import (
    ConnectorMetadata,
    ConnectorOutput,
    ConnectorStats,
    KVConnectorWorker,
)
from baton_kv_transfer.memory.layout import RankAddress
from baton_kv_transfer.memory.slot_memory import SlotMemory


class TimedConnector(KVConnectorWorker):
    """A KV connector that records events, for an engine with one transfer at a time.

    The time of `loaded` is that of the last wake-up before the load's result.
    """

    def __init__(self, inner: KVConnectorWorker, file: Path) -> None:
        self._inner = inner
        self._file = file
        self.port = inner.port
        self.woken = 0.0
        #: Transfers whose last step is running, and when their last blocks were handed over.
        self._saved: list[tuple[str, float]] = []
        #: With $BATON_STEP_FIRST: blocks of the running step.
        self._held: list[ConnectorMetadata] = []

    def register_kv_cache(self, memory: SlotMemory, ranks: Sequence[RankAddress] = ()) -> None:
        self._inner.register_kv_cache(memory, ranks)

    def start(self, metadata: ConnectorMetadata) -> None:
        self._inner.start(metadata)

    def save(self, metadata: ConnectorMetadata) -> None:
        if os.environ["BATON_STEP_FIRST"]:
            self._held.append(metadata)
        else:
            self._hand_over(metadata)

    def _hand_over(self, metadata: ConnectorMetadata) -> None:
        now = time.monotonic()
        self._inner.save(metadata)
        self._saved += [(save.transfer_id, now) for save in metadata.saves if save.last]

    def get_finished(self) -> ConnectorOutput:
        now = time.monotonic()
        while self._held:
            self._hand_over(self._held.pop())
        output = self._inner.get_finished()
        for transfer_id, handed in self._saved:
            self.write("handed", transfer_id, handed)
            self.write("saved", transfer_id, now)
        self._saved.clear()
        for transfer_id, result in output.load_results.items():
            self.write("loaded", transfer_id, self.woken, result.error)
        return output

    def set_wakeup(self, wakeup: Callable[[], None]) -> None:
        self._inner.set_wakeup(wakeup)

    def stats(self) -> ConnectorStats:
        return self._inner.stats()

    def shutdown(self) -> None:
        self._inner.shutdown()

    def write(self, event: str, transfer_id: str, seconds: float, error: str = "") -> None:
        with self._file.open("a") as file:
            file.write(json.dumps([event, transfer_id, seconds, error]) + "\n")


class TimedWorker(Worker):
    """The worker class of the benchmark's engines, which uses a TimedConnector."""

    def open_connector(self, wakeup: Callable[[], None]) -> RankAddress | None:
        def woken() -> None:
            timed.woken = time.monotonic()
            wakeup()

        address = super().open_connector(woken)
        assert self.connector is not None, "these engines transfer"
        self.connector = timed = TimedConnector(
            self.connector, Path(os.environ["BATON_TRANSFER_TIMES"])
        )
        return address

    def execute_model(self, step: SchedulerOutput) -> None:
        began = time.monotonic()
        super().execute_model(step)
        assert isinstance(self.connector, TimedConnector)
        for request_id, num_tokens in step.num_scheduled_tokens.items():
            if num_tokens == 1:
                self.connector.write("decoded", request_id, began)
