"""Delays retries after failures of operations, members and stores."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from baton_engine.elastic.coordinator.controller_config import ControllerConfig
from baton_protocol.topology import Generation, TopologyMember

#: After up to this many failed recoveries in a row, only new members are excluded. After a later
#: failure, the surviving members that caused this failure can also be excluded.
FEW_FAILURES = 2


class Retries:
    """Records failures. Decides when to retry an operation, with which members and which store."""

    def __init__(self, config: ControllerConfig) -> None:
        self._config = config
        #: Failures in a row, by kind of operation.
        self._failures: dict[str, int] = {}
        self._retry_at: dict[str, float] = {}
        #: End of a member's exclusion, by instance id.
        self._excluded_until: dict[str, float] = {}
        #: Time of the last failed preparation with a member's rendezvous store, by instance id.
        self._store_failed_at: dict[str, float] = {}

    def may_begin(self, kind: str, now: float) -> bool:
        return now >= self._retry_at.get(kind, now)

    def on_failure(self, kind: str, now: float) -> int:
        """Record a failed operation of this kind, and delay the next operation of this kind.

        The delay is `retry_s` after one failure. It doubles with each failure in a row, up to
        `retry_max_s`.

        Returns:
            Number of failures of this kind in a row.
        """
        failures = self._failures[kind] = self._failures.get(kind, 0) + 1
        backoff_s = self._config.retry_s * 2.0 ** min(failures - 1, 32)
        self._retry_at[kind] = now + min(backoff_s, self._config.retry_max_s)
        return failures

    def exclude(self, instance_ids: Collection[str], now: float) -> None:
        """Exclude these members from new generations for `retry_max_s` seconds."""
        kept = {each: until for each, until in self._excluded_until.items() if now < until}
        self._excluded_until = kept | dict.fromkeys(instance_ids, now + self._config.retry_max_s)

    def excluded(self, now: float) -> set[str]:
        return {each for each, until in self._excluded_until.items() if now < until}

    def on_store_failure(self, target: Generation, now: float) -> None:
        """Record that the preparation of the generation `target` failed.

        One member of `target` runs the rendezvous store, which may be the cause. The next
        preparation therefore prefers the store of another member.
        """
        holders = {
            each.instance_id
            for each in target.members
            if (each.host, each.store_port) == _store(target)
        }
        members = {each.instance_id for each in target.members}
        kept = {each: at for each, at in self._store_failed_at.items() if each in members}
        self._store_failed_at = kept | dict.fromkeys(holders, now)

    def store_holder(self, members: Sequence[TopologyMember]) -> TopologyMember:
        """Return the member whose rendezvous store the next generation uses.

        Choose the first of `members` whose store has no recorded failure. If all stores have
        failed, choose the member whose store failed least recently.
        """
        return min(
            members, key=lambda member: self._store_failed_at.get(member.instance_id, -math.inf)
        )

    def begin_at_once(self, kind: str) -> None:
        """Allow the next operation of this kind to begin without delay.

        Call this method if the members of the next attempt differ from those of the failed attempt.
        """
        self._retry_at.pop(kind, None)

    def clear(self) -> None:
        """Reset the failure counts and the delays of all kinds of operations.

        Call this method after a success or a new request. Exclusions of members and failures of
        stores stay recorded.
        """
        self._failures.clear()
        self._retry_at.clear()


def _store(generation: Generation) -> tuple[str, int]:
    return generation.store_host, generation.store_port
