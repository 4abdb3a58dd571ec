"""Heartbeats with one engine: how long it has been silent, and the load that it reported."""

from __future__ import annotations

from baton_protocol.messages import Ping, Pong

HEARTBEAT_INTERVAL_S = 0.5
#: Silence after which an engine counts as dead. A killed process is noticed at once, by its
#: connection; this is for frozen ones.
HEARTBEAT_TIMEOUT_S = 3.0
#: An engine that loads its model may be silent for so many times longer: imports and weights hold
#: its interpreter for seconds.
LOADING_PATIENCE = 5
SUSPECT_AFTER_INTERVALS = 2


class Heartbeat:
    """A count of the engine's silence, in intervals that begin with a PING.

    Time in which this process did not run, because it was stopped or short of CPU, does not count:
    a longer interval counts as two at most.
    """

    def __init__(self, interval_s: float, timeout_s: float) -> None:
        self.interval_s = interval_s
        self.silence_s = 0.0
        #: The latest.
        self.status: Pong | None = None
        self._timeout_s = timeout_s
        self._heard = False
        self._sequence = 0
        self._own_at_ping = 0
        self._own_at_status = 0

    def ping(self, num_unfinished: int) -> Ping:
        """Begins an interval; `num_unfinished` requests of this client are in flight."""
        self._heard = False
        self._sequence += 1
        self._own_at_ping = num_unfinished
        return Ping(self._sequence)

    def waited(self, elapsed_s: float) -> None:
        """The interval is over; so much time has passed."""
        if not self._heard:
            self.silence_s += min(max(elapsed_s, self.interval_s), 2 * self.interval_s)

    def heard(self) -> bool:
        """The engine said something. Returns whether it was suspect before."""
        was_suspect = self.suspect
        self._heard = True
        self.silence_s = 0.0
        return was_suspect

    def pong(self, pong: Pong) -> None:
        self.status = pong
        if pong.sequence == self._sequence:
            self._own_at_status = self._own_at_ping

    @property
    def draining(self) -> bool:
        return self.status is not None and self.status.draining

    @property
    def suspect(self) -> bool:
        """Silent, but not yet dead: better give it nothing new."""
        return self.silence_s >= SUSPECT_AFTER_INTERVALS * self.interval_s

    def is_dead(self, *, loading: bool) -> bool:
        return self.silence_s >= self._timeout_s * (LOADING_PATIENCE if loading else 1)

    def num_requests(self, num_unfinished: int) -> int:
        """Return the number of requests at the engine.

        These are those of all clients at its last answer, and those that this client sent later.
        """
        if self.status is None:
            return num_unfinished
        reported = self.status.num_running + self.status.num_waiting
        return max(num_unfinished, reported + num_unfinished - self._own_at_status)
