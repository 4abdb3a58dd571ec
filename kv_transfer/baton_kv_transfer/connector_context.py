"""The state that the consumer side and the producer side of a connector share."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from baton_kv_transfer.agent.agent import INIT_AGENT, Agent, DlistHandle
from baton_kv_transfer.connector import ConnectorStats
from baton_kv_transfer.memory.layout import HeadRange, KVCacheLayout, RankAddress
from baton_kv_transfer.memory.slot_memory import SlotMemory, slot_rows
from baton_kv_transfer.side_channel import MemoryDescription
from baton_protocol.options.config import KVTransferConfig
from baton_protocol.service_key import ServiceKey


@dataclass(slots=True, eq=False)
class ConnectorContext:
    """State of one worker's connector that the consumer side and the producer side share."""

    config: KVTransferConfig
    instance_id: str
    compatibility_hash: str
    #: Key that peers must have; None: peers must have no key.
    service_key: ServiceKey | None
    agent: Agent
    #: KV memory of this worker, which is registered with the agent.
    memory: SlotMemory
    #: All workers of this engine, in rank order.
    ranks: list[RankAddress]
    stats: ConnectorStats
    clock: Callable[[], float] = time.monotonic
    _local: dict[HeadRange, DlistHandle] = field(default_factory=dict)

    def local_slot_descs(self, heads: HeadRange) -> DlistHandle:
        """Return prepared descriptors of `heads` in each slot of this worker's memory."""
        if heads not in self._local:
            memory = self.memory
            rows = slot_rows(
                memory.base_address,
                memory.num_slots,
                memory.layout,
                heads,
                device_id=memory.device_id,
            )
            self._local[heads] = self.agent.prep_xfer_dlist(INIT_AGENT, rows, memory.mem_type)
        return self._local[heads]

    def peer_slot_descs(
        self, agent_name: str, memory: MemoryDescription, layout: KVCacheLayout
    ) -> DlistHandle | None:
        """Return prepared descriptors of the shared heads in each slot of a peer's memory.

        The result is None if the peer and this worker share no head.

        Args:
            agent_name: name of the peer's agent, which `Agent.add_remote_agent` has added.
            memory: memory of the peer, which `explain_invalid_memory` has accepted.
            layout: layout of the peer's blocks.
        """
        heads = self.memory.layout.heads.overlap(layout.heads)
        if not heads.count:
            return None
        rows = slot_rows(
            memory.base_address, memory.num_slots, layout, heads, device_id=memory.device_id
        )
        return self.agent.prep_xfer_dlist(agent_name, rows, memory.mem_type)

    def drop_local_slot_descs(self) -> None:
        """Drop the cached results of `local_slot_descs`, which `Agent.fence` has made invalid."""
        self._local.clear()

    def describe_memory(self) -> MemoryDescription:
        """Return a description of this worker's memory for the message DESCRIBE or DESCRIPTION."""
        memory = self.memory
        return MemoryDescription(
            self.agent.get_agent_metadata(),
            memory.base_address,
            memory.num_slots,
            memory.layout.block_nbytes,
            memory.mem_type,
            memory.device_id,
        )
