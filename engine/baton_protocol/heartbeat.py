"""Heartbeats with one engine: the length of its silence, and the load that it reported."""

from __future__ import annotations

from baton_protocol.messages import Ping, Pong

HEARTBEAT_INTERVAL_S = 0.5
#: Silence after which an engine counts as dead. The connection of a killed process ends at once,
#: so this detects a process that is stopped or stalled.
HEARTBEAT_TIMEOUT_S = 3.0
#: Factor of the timeout while an engine loads its model. Imports and weight loading hold the GIL
#: for seconds.
LOADING_FACTOR = 5
#: Intervals of silence after which an engine is suspect.
SUSPECT_AFTER_INTERVALS = 2


class Heartbeat:
    """A count of the engine's silence, in intervals that begin with a PING.

    A long interval counts as no more than two. The rest is time in which this process did not run,
    because it was stopped or short of CPU.
    """

    def __init__(self, interval_s: float, timeout_s: float) -> None:
        self.interval_s = interval_s
        self.silence_s = 0.0
        #: The latest PONG.
        self.status: Pong | None = None
        self._timeout_s = timeout_s
        self._has_received = False  # in this interval
        self._sequence = 0
        self._own_at_ping = 0
        self._own_at_status = 0

    def begin_interval(self, num_unfinished: int) -> Ping:
        """Begin an interval and return its PING.

        Args:
            num_unfinished: requests of this client in flight.
        """
        self._has_received = False
        self._sequence += 1
        self._own_at_ping = num_unfinished
        return Ping(self._sequence)

    def end_interval(self, elapsed_s: float) -> None:
        """End the interval, which lasted `elapsed_s` seconds."""
        if not self._has_received:
            self.silence_s += min(max(elapsed_s, self.interval_s), 2 * self.interval_s)

    def record_message(self) -> bool:
        """Record a message from the engine. Return whether the engine was suspect before."""
        was_suspect = self.is_suspect
        self._has_received = True
        self.silence_s = 0.0
        return was_suspect

    def record_pong(self, pong: Pong) -> None:
        self.status = pong
        if pong.sequence == self._sequence:
            self._own_at_status = self._own_at_ping

    @property
    def is_draining(self) -> bool:
        return self.status is not None and self.status.draining

    @property
    def is_suspect(self) -> bool:
        """Whether the engine has been silent for too long to get new requests."""
        return self.silence_s >= SUSPECT_AFTER_INTERVALS * self.interval_s

    def is_dead(self, *, loading: bool) -> bool:
        return self.silence_s >= self._timeout_s * (LOADING_FACTOR if loading else 1)

    def num_requests(self, num_unfinished: int) -> int:
        """Return an estimate of the number of requests at the engine.

        The last PONG's number plus the change of `num_unfinished` (own requests) since its PING.
        """
        if self.status is None:
            return num_unfinished
        reported = self.status.num_running + self.status.num_waiting
        return max(num_unfinished, reported + num_unfinished - self._own_at_status)
