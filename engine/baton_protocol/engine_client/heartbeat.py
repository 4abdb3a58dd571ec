"""Heartbeats of a client: whether an engine is alive, and the load that the engine reported."""

from __future__ import annotations

from baton_protocol.engine_messages import Ping, Pong

HEARTBEAT_INTERVAL_S = 0.5
#: Time without a message after which an engine counts as dead. A killed process loses its
#: connection at once, so this timeout detects a process that is stopped or stalled.
HEARTBEAT_TIMEOUT_S = 3.0
#: Factor of the timeout while an engine loads its model. Imports and weight loading hold the GIL
#: for seconds.
LOADING_FACTOR = 5
#: Intervals without a message after which an engine is suspect and gets no new requests.
SUSPECT_AFTER_INTERVALS = 2


class HeartbeatMonitor:
    """Measures for how long an engine has sent no message. Each interval begins with a PING.

    An interval adds at most twice `interval_s` to the measured time. If an interval lasts longer
    than that, this process itself was stopped or short of CPU, so the rest does not count.
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
        """Begin an interval and return the PING to send.

        Args:
            num_unfinished: number of this client's requests in flight.
        """
        self._has_received = False
        self._sequence += 1
        self._own_at_ping = num_unfinished
        return Ping(self._sequence)

    def end_interval(self, elapsed_s: float) -> None:
        """End the interval, which lasted `elapsed_s` seconds.

        If a message arrived in the interval, `silence_s` does not change. Otherwise, it grows by
        `elapsed_s`, but by at least `interval_s` and at most twice `interval_s`.
        """
        if not self._has_received:
            self.silence_s += min(max(elapsed_s, self.interval_s), 2 * self.interval_s)

    def record_message(self) -> bool:
        """Record a message from the engine. Return the value of `is_suspect` before the message."""
        was_suspect = self.is_suspect
        self._has_received = True
        self.silence_s = 0.0
        return was_suspect

    def record_pong(self, pong: Pong) -> None:
        self.status = pong
        if pong.sequence == self._sequence:
            self._own_at_status = self._own_at_ping

    @property
    def accepts_requests(self) -> bool:
        """Whether the engine accepted requests at its last PONG. False before the first PONG."""
        return self.status is not None and not (self.status.draining or self.status.paused)

    @property
    def is_suspect(self) -> bool:
        """Whether the engine has been silent for SUSPECT_AFTER_INTERVALS intervals or longer.

        A suspect engine must get no new requests.
        """
        return self.silence_s >= SUSPECT_AFTER_INTERVALS * self.interval_s

    def is_dead(self, *, loading: bool) -> bool:
        return self.silence_s >= self._timeout_s * (LOADING_FACTOR if loading else 1)

    def num_requests(self, num_unfinished: int) -> int:
        """Return the estimated number of requests at the engine, including those of other clients.

        The estimate begins with the number in the last PONG. It adds the change in the number of
        this client's own requests since the corresponding PING. Before the first PONG, only this
        client's requests are counted.

        Args:
            num_unfinished: number of this client's requests in flight.
        """
        if self.status is None:
            return num_unfinished
        reported = self.status.num_running + self.status.num_waiting
        return max(num_unfinished, reported + num_unfinished - self._own_at_status)
