"""Drain members: prefill and decode pods that an earlier reconcile marked as draining."""

from __future__ import annotations

import asyncio

import msgspec

from baton_operator.observe.observation import Observation
from baton_operator.observe.pod_clients import Drainer
from baton_operator.plan.plan_group import Member


async def drain_members(drainer: Drainer, observed: Observation) -> Observation:
    """Send `POST /drain` to each member that must drain.

    Returns:
        `observed` with the numbers of unfinished requests and transfers in the replies, which the
        planner needs.
    """
    addresses = {
        pod["metadata"]["name"]: pod.get("status", {}).get("podIP") for pod in observed.pods
    }

    async def drain(member: Member) -> Member:
        if not member.must_drain:
            return member
        unfinished = await drainer.drain(addresses[member.name], observed.service_key)
        return msgspec.structs.replace(member, unfinished=unfinished)

    drained = {
        role: list(await asyncio.gather(*map(drain, members)))
        for role, members in observed.members.items()
    }
    return msgspec.structs.replace(observed, members=drained)
