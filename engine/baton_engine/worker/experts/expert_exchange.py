"""Experts that a rank gets from the ranks which hold them already, instead of reading the checkpoint.

Over a group of its own, so that serving is not disturbed. All members tell each other what they hold; from that, and from the
placement, each makes the same list of transfers, and works off its part of it in the list's order: no two can wait for each other.
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


class Transfer(NamedTuple):
    key: ExpertKey
    source: int
    target: int


def wanted_by(placement: Placement, rank: int) -> set[ExpertKey]:
    """What the rank is to hold."""
    return {
        ExpertKey(layer, expert) for layer, ranks in enumerate(placement) for expert in ranks[rank]
    }


def plan_transfers(held: list[set[ExpertKey]], placement: Placement) -> list[Transfer]:
    """What is to be sent, ordered by layer; the same on every rank. Experts that nobody holds are not in it.

    Args:
        held: by rank.
    """
    holders: dict[ExpertKey, list[int]] = {}
    for rank, keys in enumerate(held):
        for key in keys:
            holders.setdefault(key, []).append(rank)
    return sorted(
        Transfer(key, sources[(key.expert + target) % len(sources)], target)
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
    """Sends and receives what the members of the group lack; `take` gets each expert that has come. Collective.

    A member that is lost or silent ends it, for everybody: what has not come by then is read from the checkpoint. Ends early, too,
    when `is_cancelled`.
    """
    try:
        for transfer in plan_transfers(
            _tell_held(group, placement, held, store.num_experts), placement
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
                "experts that other ranks did not send are read from the checkpoint: %s", error
            )


def _tell_held(
    group: Group, placement: Placement, held: Collection[ExpertKey], num_experts: int
) -> list[set[ExpertKey]]:
    """By rank."""
    own = torch.zeros((len(placement), num_experts), dtype=torch.uint8)
    for layer, expert in held:
        own[layer, expert] = 1
    by_rank = group.all_gather(own[None], dim=0)
    return [{ExpertKey(*pair) for pair in rank.nonzero().tolist()} for rank in by_rank]
