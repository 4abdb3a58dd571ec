"""What is not tried again at once: kinds of operations that failed, members that could not be prepared, stores in vain."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from baton_engine.elastic.coordinator.controller_config import ControllerConfig
from baton_protocol.topology import Generation, Member

FEW_FAILURES = 2
"""Recoveries that may fail before members that cannot be prepared are left out."""


class Retries:
    def __init__(self, config: ControllerConfig) -> None:
        self._config = config
        self._failures: dict[str, int] = {}
        """In a row, by kind of operation."""
        self._retry_at: dict[str, float] = {}
        self._excluded_until: dict[str, float] = {}
        """By instance id."""
        self._store_failed_at: dict[str, float] = {}
        """By instance id of its holder, when a generation that was to meet in this store could not be prepared."""

    def may_begin(self, kind: str, now: float) -> bool:
        return now >= self._retry_at.get(kind, now)

    def on_failure(self, kind: str, now: float) -> int:
        """Returns the failures in a row."""
        failures = self._failures[kind] = self._failures.get(kind, 0) + 1
        backoff_s = self._config.retry_s * 2.0 ** min(failures - 1, 32)
        self._retry_at[kind] = now + min(backoff_s, self._config.retry_max_s)
        return failures

    def exclude(self, instance_ids: Collection[str], now: float) -> None:
        """From newcomers and survivors, for a while."""
        kept = {each: until for each, until in self._excluded_until.items() if now < until}
        self._excluded_until = kept | dict.fromkeys(instance_ids, now + self._config.retry_max_s)

    def excluded(self, now: float) -> set[str]:
        return {each for each, until in self._excluded_until.items() if now < until}

    def on_store_failure(self, target: Generation, now: float) -> None:
        """Whatever the reasons were: a store that does not answer looks like members that do not come."""
        holders = {
            each.instance_id
            for each in target.members
            if (each.host, each.store_port) == _store(target)
        }
        members = {each.instance_id for each in target.members}
        kept = {each: at for each, at in self._store_failed_at.items() if each in members}
        self._store_failed_at = kept | dict.fromkeys(holders, now)

    def store_holder(self, members: Sequence[Member]) -> Member:
        """Of members in rank order, in whose store they shall meet: where nothing failed yet, else where it did the longest ago."""
        return min(
            members, key=lambda member: self._store_failed_at.get(member.instance_id, -math.inf)
        )

    def begin_at_once(self, kind: str) -> None:
        """Something else will be tried."""
        self._retry_at.pop(kind, None)

    def clear(self) -> None:
        """All works, or something else is asked for: nothing is held back any more."""
        self._failures.clear()
        self._retry_at.clear()


def _store(generation: Generation) -> tuple[str, int]:
    return generation.store_host, generation.store_port
