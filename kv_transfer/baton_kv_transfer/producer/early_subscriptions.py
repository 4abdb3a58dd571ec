"""SUBSCRIBE and RELEASE messages that arrive before the scheduler offers the transfer.

A consumer sends SUBSCRIBE when its own engine has scheduled the request. The producer's engine may
accept the request later. Each held message has a lease, which heartbeats renew. At the end of the
lease, a RELEASE is dropped and a SUBSCRIBE is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass

from baton_kv_transfer import side_channel
from baton_kv_transfer.producer.sessions import Send, Session

#: Limit of messages that are held at the same time, for all transfers together.
MAX_EARLY = 16384
#: Limit of the push slots in all held subscriptions together.
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
    """The SUBSCRIBE and RELEASE messages for transfers that are not offered yet."""

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
        """Hold a SUBSCRIBE until the transfer is offered.

        If the same SUBSCRIBE is held already, do nothing.

        Returns:
            Why the SUBSCRIBE is refused; empty if it is held.
        """
        held = self._early.get(message.transfer_id, {}).get((session.identity, message.subscriber))
        if held is not None:
            if held.message.generation == message.generation and isinstance(
                held.message, side_channel.Subscribe
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
        """Hold a RELEASE until the transfer is offered.

        The RELEASE replaces a held SUBSCRIBE of the same load. With push, RELEASED is sent for the
        replaced SUBSCRIBE. A RELEASE without an earlier SUBSCRIBE is also held.
        """
        held = self._early.get(message.transfer_id, {}).get((session.identity, message.subscriber))
        if held is None:
            if self._num_early < MAX_EARLY:
                self._put(session, message)
        elif held.message.generation == message.generation and isinstance(
            held.message, side_channel.Subscribe
        ):
            self._num_slots -= held.num_slots
            if held.message.push_slots is not None:
                self._send(
                    session.identity, side_channel.Released(message.transfer_id, message.generation)
                )
            held.message = message

    def take(
        self, transfer_id: str
    ) -> list[tuple[Session, side_channel.Subscribe | side_channel.Release]]:
        """Remove and return the messages for a transfer, in the order of arrival."""
        early = self._early.pop(transfer_id, {}).values()
        self._forget(early)
        return [(held.session, held.message) for held in early]

    def extend(self, session: Session, transfer_ids: list[str]) -> None:
        for transfer_id in transfer_ids:
            for held in self._early.get(transfer_id, {}).values():
                if held.session is session:
                    held.deadline = self._clock() + self._lease_s

    def drop(self, session: Session) -> None:
        """Remove the held messages of a session that is lost. Refuse each SUBSCRIBE among them."""
        for key, held in self._all():
            if held.session is session:
                self._refuse(key, held, f"was not offered yet, and {session.error}")

    def expire(self, now: float) -> None:
        """Remove held messages whose lease has ended. Refuse each SUBSCRIBE among them."""
        if now < self.next_expiry:
            return
        for key, held in self._all():
            if now >= held.deadline:
                self._refuse(key, held, f"was not offered within {self._lease_s:g} s")
        self.next_expiry = min((held.deadline for _, held in self._all()), default=math.inf)

    def _all(self) -> list[tuple[_Key, _HeldMessage]]:
        return [entry for early in self._early.values() for entry in early.items()]

    def _put(
        self, session: Session, message: side_channel.Subscribe | side_channel.Release
    ) -> None:
        held = _HeldMessage(session, message, self._clock() + self._lease_s)
        self._early.setdefault(message.transfer_id, {})[session.identity, message.subscriber] = held
        self.next_expiry = min(self.next_expiry, held.deadline)
        self._num_early += 1
        self._num_slots += held.num_slots

    def _refuse(self, key: _Key, held: _HeldMessage, why: str) -> None:
        """Remove a held message. If it is a SUBSCRIBE, send the refusal."""
        transfer_id = held.message.transfer_id
        early = self._early[transfer_id]
        self._forget([early.pop(key)])
        if not early:
            del self._early[transfer_id]
        if isinstance(held.message, side_channel.Subscribe):
            reason = f"transfer {transfer_id} {why}"
            refuse_subscription(self._send, held.session, held.message, reason)

    def _forget(self, early: Collection[_HeldMessage]) -> None:
        self._num_early -= len(early)
        self._num_slots -= sum(held.num_slots for held in early)


def refuse_subscription(
    send: Send, session: Session, message: side_channel.Subscribe, reason: str
) -> None:
    """Refuse a subscription: send CANCELLED and, with push, RELEASED.

    RELEASED means that nothing was written and nothing will be written.
    """
    send(session.identity, side_channel.Cancelled(message.transfer_id, message.generation, reason))
    if message.push_slots is not None:
        send(session.identity, side_channel.Released(message.transfer_id, message.generation))
