"""What both halves of a worker's connector share: the agent, the registered memory, the configuration."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from baton_kv_transfer.agent.agent import INIT_AGENT, Agent, DlistHandle
from baton_kv_transfer.connector import ConnectorStats
from baton_kv_transfer.memory.kv_memory import KVMemory, slot_rows
from baton_kv_transfer.memory.layout import HeadRange, RankAddress
from baton_kv_transfer.side_channel import MemoryDescription
from baton_protocol.config import KVTransferConfig
from baton_protocol.service_key import ServiceKey


@dataclass(slots=True, eq=False)
class ConnectorContext:
    config: KVTransferConfig
    instance_id: str
    compatibility_hash: str
    service_key: ServiceKey | None
    """PeerRegistry must have the same; None: they must have none."""
    agent: Agent
    memory: KVMemory
    """Registered with the agent."""
    ranks: list[RankAddress]
    """All workers of this engine, in rank order."""
    stats: ConnectorStats
    clock: Callable[[], float] = time.monotonic
    _local: dict[HeadRange, DlistHandle] = field(default_factory=dict)

    def local_slots(self, heads: HeadRange) -> DlistHandle:
        """Descriptors of these heads in each slot of the memory."""
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

    def renew(self) -> None:
        """After a fence: descriptor lists are made again."""
        self._local.clear()

    def describe_memory(self) -> MemoryDescription:
        memory = self.memory
        return MemoryDescription(
            self.agent.get_agent_metadata(),
            memory.base_address,
            memory.num_slots,
            memory.layout.block_nbytes,
            memory.mem_type,
            memory.device_id,
        )
