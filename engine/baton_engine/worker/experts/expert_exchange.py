"""Transfers experts between ranks, so that the ranks read fewer experts from the checkpoint.

The transfers use a process group of their own, so that serving steps are not disturbed. First, each
member sends the list of its experts to all other members. From these lists and the placement, all
members compute the same list of transfers. Each member runs its transfers in the order of this
list, so no deadlock is possible.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

import torch

from baton_engine.distributed.group import Group
from baton_engine.distributed.group_errors import GroupBrokenError
from baton_engine.worker.experts.expert_weights import Expert, ExpertKey, ExpertStore
from baton_protocol.topology import Placement

logger = logging.getLogger(__name__)


class ExpertTransfer(NamedTuple):
    """The transfer of one expert from rank `source` to rank `target`."""

    key: ExpertKey
    source: int
    target: int


def wanted_by(placement: Placement, rank: int) -> set[ExpertKey]:
    """Return the experts that the placement assigns to a rank."""
    return {
        ExpertKey(layer, expert) for layer, ranks in enumerate(placement) for expert in ranks[rank]
    }


def plan_transfers(held: list[set[ExpertKey]], placement: Placement) -> list[ExpertTransfer]:
    """Return the transfers of missing experts, ordered by layer. All ranks compute the same list.

    Experts that no rank holds are left out.

    Args:
        held: experts that each rank holds, by rank.
        placement: experts that each rank must have.
    """
    holders: dict[ExpertKey, list[int]] = {}
    for rank, keys in enumerate(held):
        for key in keys:
            holders.setdefault(key, []).append(rank)
    return sorted(
        ExpertTransfer(key, sources[(key.expert + target) % len(sources)], target)
        for target, keys in enumerate(held)
        for key in wanted_by(placement, target) - keys
        if (sources := holders.get(key))
    )


def exchange_experts(
    group: Group,
    placement: Placement,
    held: Mapping[ExpertKey, Expert],
    store: ExpertStore,
    take: Callable[[ExpertKey, Expert], None],
    is_cancelled: Callable[[], bool],
) -> None:
    """Send and receive the experts that members of the group lack. Collective.

    If a member is lost or does not respond, the exchange ends early for all members. Each member
    must then read from the checkpoint the experts that it has not received.

    Args:
        group: process group of the generation's members. Aborted if the exchange ends early.
        placement: experts of each rank, by sparse layer.
        held: experts that this rank can send.
        store: converts experts to messages and back.
        take: called with each expert that arrives.
        is_cancelled: if this returns True, the exchange ends early.
    """
    try:
        for transfer in plan_transfers(
            _exchange_held(group, placement, held, store.num_experts), placement
        ):
            if is_cancelled():
                group.abort()
                return
            if transfer.source == group.rank:
                for part in store.to_parts(held[transfer.key]):
                    group.send(part, transfer.target)
            elif transfer.target == group.rank:
                parts = [
                    group.recv(part, transfer.source) for part in store.new_parts(transfer.key)
                ]
                take(transfer.key, store.from_parts(parts))
    except (GroupBrokenError, TimeoutError) as error:
        group.abort()
        if not is_cancelled():
            logger.warning(
                "the exchange of experts with other ranks ended early (%s); this rank reads the "
                "missing experts from the checkpoint",
                error,
            )


def _exchange_held(
    group: Group, placement: Placement, held: Collection[ExpertKey], num_experts: int
) -> list[set[ExpertKey]]:
    """Exchange the sets of experts that ranks hold, and return the sets by rank. Collective."""
    own = torch.zeros((len(placement), num_experts), dtype=torch.uint8)
    for layer, expert in held:
        own[layer, expert] = 1
    by_rank = group.all_gather(own[None], dim=0)
    return [{ExpertKey(*pair) for pair in rank.nonzero().tolist()} for rank in by_rank]
