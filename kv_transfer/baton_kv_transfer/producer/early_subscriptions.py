"""Subscriptions that arrive before the scheduler offers the transfer.

A consumer sends SUBSCRIBE as soon as its own engine has scheduled the request, which may be before
the producer's engine has accepted the request. Heartbeats renew the lease of a subscription, which
is refused when its lease ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass

from baton_kv_transfer import side_channel
from baton_kv_transfer.producer.sessions import Send, Session

#: Limit of messages that are held at the same time, for all transfers together.
MAX_EARLY = 16384
#: Limit of the slots of consumers' memory that all held subscriptions together name.
MAX_EARLY_SLOTS = 2**22

#: ZeroMQ identity of the connection, and `Subscribe.subscriber`.
_Key = tuple[bytes, int]


@dataclass(slots=True)
class _HeldMessage:
    session: Session
    message: side_channel.Subscribe | side_channel.Release
    deadline: float

    @property
    def num_slots(self) -> int:
        return (
            len(self.message.push_slots or ())
            if isinstance(self.message, side_channel.Subscribe)
            else 0
        )


class EarlySubscriptions:
    """Subscriptions and releases for transfers that are not offered yet."""

    def __init__(self, lease_s: float, send: Send, clock: Callable[[], float]) -> None:
        self._lease_s = lease_s
        self._send = send
        self._clock = clock
        self._early: dict[str, dict[_Key, _HeldMessage]] = {}  # by transfer id
        self._num_early = 0
        self._num_slots = 0
        #: No lease ends before this time.
        self.next_expiry = math.inf

    def __len__(self) -> int:
        return self._num_early

    def add(self, session: Session, message: side_channel.Subscribe) -> str:
        """Hold a subscription until the transfer is offered.

        A repeated subscription is held once.

        Returns:
            Why the subscription is refused; empty if it is held.
        """
        known = self._early.get(message.transfer_id, {}).get((session.identity, message.subscriber))
        if known is not None:
            if known.message.generation == message.generation and isinstance(
                known.message, side_channel.Subscribe
            ):
                return ""
            return (
                f"subscriber {message.subscriber} of transfer {message.transfer_id} exists already"
            )
        if (
            self._num_early >= MAX_EARLY
            or self._num_slots + len(message.push_slots or ()) > MAX_EARLY_SLOTS
        ):
            return f"{self._num_early} subscriptions wait for their offers: retry later"
        self._put(session, message)
        return ""

    def release(self, session: Session, message: side_channel.Release) -> None:
        """Hold a RELEASE until the transfer is offered, in place of a held SUBSCRIBE.

        A RELEASE without an earlier SUBSCRIBE is also held.
        """
        known = self._early.get(message.transfer_id, {}).get((session.identity, message.subscriber))
        if known is None:
            if self._num_early < MAX_EARLY:
                self._put(session, message)
        elif known.message.generation == message.generation and isinstance(
            known.message, side_channel.Subscribe
        ):
            self._num_slots -= known.num_slots
            if known.message.push_slots is not None:
                self._send(
                    session.identity, side_channel.Released(message.transfer_id, message.generation)
                )
            known.message = message

    def take(
        self, transfer_id: str
    ) -> list[tuple[Session, side_channel.Subscribe | side_channel.Release]]:
        """Remove and return the messages for a transfer, in the order of arrival."""
        early = self._early.pop(transfer_id, {}).values()
        self._forget(early)
        return [(one.session, one.message) for one in early]

    def extend(self, session: Session, transfer_ids: list[str]) -> None:
        for transfer_id in transfer_ids:
            for one in self._early.get(transfer_id, {}).values():
                if one.session is session:
                    one.deadline = self._clock() + self._lease_s

    def drop(self, session: Session) -> None:
        """Remove the messages of a lost session, and refuse its subscriptions."""
        for transfer_id, key, one in self._all():
            if one.session is session:
                self._remove(transfer_id, key)
                if isinstance(one.message, side_channel.Subscribe):
                    why = f"transfer {transfer_id} was not offered yet, and {session.error}"
                    refuse_subscription(self._send, session, one.message, why)

    def expire(self, now: float) -> None:
        """Drop messages that have waited for a lease. Refuse their subscriptions."""
        if now < self.next_expiry:
            return
        for transfer_id, key, one in self._all():
            if now >= one.deadline:
                self._remove(transfer_id, key)
                if isinstance(one.message, side_channel.Subscribe):
                    reason = f"transfer {transfer_id} was not offered within {self._lease_s:g} s"
                    refuse_subscription(self._send, one.session, one.message, reason)
        self.next_expiry = min((one.deadline for _, _, one in self._all()), default=math.inf)

    def _all(self) -> list[tuple[str, _Key, _HeldMessage]]:
        return [
            (transfer_id, key, one)
            for transfer_id, early in self._early.items()
            for key, one in early.items()
        ]

    def _put(
        self, session: Session, message: side_channel.Subscribe | side_channel.Release
    ) -> None:
        one = _HeldMessage(session, message, self._clock() + self._lease_s)
        self._early.setdefault(message.transfer_id, {})[session.identity, message.subscriber] = one
        self.next_expiry = min(self.next_expiry, one.deadline)
        self._num_early += 1
        self._num_slots += one.num_slots

    def _remove(self, transfer_id: str, key: _Key) -> None:
        early = self._early[transfer_id]
        self._forget([early.pop(key)])
        if not early:
            del self._early[transfer_id]

    def _forget(self, early: Collection[_HeldMessage]) -> None:
        self._num_early -= len(early)
        self._num_slots -= sum(one.num_slots for one in early)


def refuse_subscription(
    send: Send, session: Session, message: side_channel.Subscribe, reason: str
) -> None:
    """Refuse a subscription: send CANCELLED and, with push, RELEASED.

    RELEASED means that nothing was written and nothing will be written.
    """
    send(session.identity, side_channel.Cancelled(message.transfer_id, message.generation, reason))
    if message.push_slots is not None:
        send(session.identity, side_channel.Released(message.transfer_id, message.generation))
