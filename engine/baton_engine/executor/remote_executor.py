"""The common part of executors whose workers are other processes, which may die."""

from __future__ import annotations

import abc
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from baton_engine.executor.base import Executor
from baton_engine.executor.futures import reject
from baton_engine.executor.startup import num_concurrent_batches
from baton_protocol.options.config import EngineConfig


class RemoteExecutor(Executor):
    """Base class of executors whose workers are other processes.

    Records the first failure, after which no step can run. Reports the death of a worker once.
    """

    def __init__(self, config: EngineConfig, instance_id: str, wakeup: Callable[[], None]) -> None:
        super().__init__(config, instance_id, wakeup)
        self.max_concurrent_batches = num_concurrent_batches(config)
        self._world_size = config.parallel.world_size
        #: Guards the fields below, which several threads use.
        self._lock = threading.Lock()
        #: The error after which no step can run.
        self._failure: Exception | None = None
        #: Whether a worker has died. If so, calls fail as well as steps.
        self._died = False
        self._on_failure: Callable[[str], None] | None = None
        self._stopping = False

    def set_failure_callback(self, callback: Callable[[str], None]) -> None:
        with self._lock:
            self._on_failure = callback
            already = self._failure if self._died else None
        if already is not None:
            callback(str(already))

    @abc.abstractmethod
    def _take_pending(self, died: bool) -> list[Future[Any]]:
        """Return the futures that must fail now. The caller holds `_lock`.

        The result contains the futures of all pending steps.

        Args:
            died: whether a worker has died. If so, the result must also contain the futures of all
                pending calls. Otherwise, these futures may be left out.
        """

    def _fail(self, error: Exception, *, died: bool) -> None:
        """Fail pending and later steps. If a worker has died (`died`), report its death once."""
        with self._lock:
            self._failure = self._failure or error
            callback = self._on_failure if died and not self._died and not self._stopping else None
            self._died = self._died or died
            pending = self._take_pending(died)
        for future in pending:
            reject(future, error)
        if callback is not None:
            callback(str(error))
