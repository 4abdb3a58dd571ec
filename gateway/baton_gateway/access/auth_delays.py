"""Slows down clients that keep sending requests without a valid API key."""

from __future__ import annotations

import ipaddress
import time
from collections import OrderedDict
from collections.abc import Callable

#: Number of 401 responses that one address gets without delay. Every REFILL_S seconds allow
#: one more response without delay.
BURST = 10
REFILL_S = 6.0
#: Delay of each further refusal, in seconds.
DELAY_S = 2.0
#: Number of addresses in the table. Beyond it, the address whose last refusal is oldest is dropped.
MAX_ADDRESSES = 4096


class AuthDelays:
    """Delays the 401 responses to an address that has got many 401 responses.

    Requests with a valid key are not delayed. All clients behind a proxy have the proxy's address.
    If one of these clients guesses keys, the 401 responses to all of them are delayed.

    Args:
        clock: returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        #: By address: the time at which all of its refusals are forgotten.
        self._forgotten_at: OrderedDict[str, float] = OrderedDict()

    def record(self, address: str | None) -> float:
        """Record a 401 response to `address`. Return by how many seconds to delay the response."""
        now, key = self._clock(), _network(address or "")
        forgotten_at = max(now, self._forgotten_at.pop(key, now)) + REFILL_S
        is_delayed = forgotten_at - now > BURST * REFILL_S
        # A delayed refusal does not count, so one refusal per REFILL_S is always sent at once.
        self._forgotten_at[key] = forgotten_at - REFILL_S if is_delayed else forgotten_at
        if len(self._forgotten_at) > MAX_ADDRESSES:
            self._forgotten_at.popitem(last=False)
        return DELAY_S if is_delayed else 0.0


def _network(address: str) -> str:
    """Return an IPv4 address unchanged, and for an IPv6 address its /64 network.

    One client may use all addresses of a /64 network.
    """
    if ":" not in address:
        return address
    return str(ipaddress.IPv6Network((address.partition("%")[0], 64), strict=False))
