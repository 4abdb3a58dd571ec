"""The consumer side of the connector, which the connector's thread runs.

`run_round` receives messages, reads and verifies blocks, and moves each load through its states. A
per-rank transfer is the part of a load that comes from one worker of the producer. These rules
hold:

- Each load has exactly one LoadResult. Each handshake and each per-rank transfer has a deadline.
- A block is valid after every per-rank transfer has verified its part of the block in this engine's
  memory.
- After the LoadResult, nothing writes to the load's blocks: all its reads have ended. With push,
  the producer's writes have ended too. Either the producer has sent RELEASED, or its last write was
  verified, or a fence (`Agent.fence`) has cut the producer off.
"""

from __future__ import annotations

import contextlib
import logging
from collections import defaultdict
from collections.abc import Iterator

import msgspec
import zmq

from baton_kv_transfer import side_channel
from baton_kv_transfer.connector import FailureReason, LoadRequest, LoadResult, LoadWait
from baton_kv_transfer.connector_context import ConnectorContext
from baton_kv_transfer.consumer.block_verifier import BlockVerifier
from baton_kv_transfer.consumer.load_manager import LoadManager
from baton_kv_transfer.consumer.load_state import LoadState
from baton_kv_transfer.consumer.peer import Peer
from baton_kv_transfer.consumer.peer_registry import PeerRegistry

logger = logging.getLogger(__name__)


class ConsumerSide:
    """The loads of this worker, and the connections to producers."""

    def __init__(self, context: ConnectorContext) -> None:
        """Create a consumer side without loads, and describe the memory for handshakes.

        Args:
            context: state shared with the producer side.

        Raises:
            ValueError: the engine has more workers than KV heads, or this worker's heads are not in
                `context.ranks`.
        """
        self._context = context
        self._agent, self._clock = context.agent, context.clock
        #: Whether `run_round` has called `Agent.fence` since the last `take_fence`.
        self._has_fenced = False
        #: Loads that wait for memory: transfer id to the lead peer (see `Load.lead_peer`).
        self._waits: dict[str, Peer] = {}
        self._peers = PeerRegistry(context)
        self._verifier = BlockVerifier(context)
        self._loads = LoadManager(context, self._peers, self._verifier)
        self._peers.describe_memory()

    # From the scheduler

    def add_wait(self, transfer_id: str, wait: LoadWait) -> None:
        """Send heartbeats for a load that waits for memory, so that the producer keeps the blocks.

        These heartbeats end when `begin` starts the load, or when the producer is lost.
        """
        try:
            lead_peer = self._peers.connect(
                wait.remote_host, wait.remote_port, wait.peer_instance_id, self._clock()
            )
        except zmq.ZMQError:
            return  # the load will fail with the reason
        self._waits[transfer_id] = lead_peer

    def begin(self, request: LoadRequest) -> None:
        """Begin a load. The load's own heartbeats replace those of `add_wait`."""
        self._waits.pop(request.transfer_id, None)
        self._loads.begin(request, self._clock())

    def cancel(self, transfer_id: str) -> None:
        load = self._loads.get(transfer_id)
        if load is not None:
            now = self._clock()
            self._loads.fail(load, FailureReason.CANCELLED, "cancelled", now)
            self._loads.advance(load, now)

    def fail_all(self, reason: str) -> Iterator[tuple[str, LoadResult]]:
        """Fail and end every load. Call this only after closing the agent.

        Returns:
            The transfer ids and results of the loads that `run_round` has not yielded.
        """
        now = self._clock()
        self._verifier.discard_all()
        for load in self._loads:
            self._loads.fail(load, FailureReason.DEFECT, reason, now)
            self._loads.end(load, now)
        return self._loads.take_finished()

    def close(self) -> None:
        for peer in self._peers:
            peer.close()

    # From the thread's loop

    def peers(self) -> list[Peer]:
        return list(self._peers)

    def run_round(self, now: float) -> Iterator[tuple[str, LoadResult]]:
        """Receive messages, read and verify blocks, update all loads, and send heartbeats.

        Yields:
            The transfer id and the result of each load that has ended. The result of a completed
            load is yielded before RELEASE is sent, because the engine waits for the result.
        """
        yield from self._loads.take_finished()  # ended by `begin` or `cancel`
        if notifications := list(self._notifications()):
            for peer, notification in notifications:
                self._loads.handle_message(peer, notification, now)
            self._verify_blocks()
            yield from self._loads.advance_all(now)  # pushed blocks may have completed loads
        for peer in self._peers:
            for message in peer.receive(now):
                self._loads.handle_message(peer, message, now)
        self._verify_blocks()
        # Deadlines are checked after the messages, because a message may extend or end a load.
        yield from self._loads.advance_all(now)
        self._loads.check_deadlines(now)
        for peer in self._peers:
            if peer.error:
                self._lose(peer, now)
        if why_fenced := self._fence_needed(now):
            self._fence(why_fenced, now)
        # Ends loads that a deadline, a lost peer or the fence has failed.
        yield from self._loads.advance_all(now)
        self._send_heartbeats(now)

    def take_fence(self) -> bool:
        """Return whether `run_round` has called `Agent.fence` since the last call of this function.

        A fence removes all peers of the agent, including the peers of the producer side.
        """
        has_fenced, self._has_fenced = self._has_fenced, False
        return has_fenced

    def _verify_blocks(self) -> None:
        for rank_transfer, wrong in self._verifier.verify_arrived():
            self._loads.record_verified(rank_transfer, wrong, self._clock())

    def next_deadline(self) -> float | None:
        """Return the time at which `run_round` must run even without an event.

        None means that only an event makes `run_round` necessary.
        """
        is_due = self._loads.has_finished or self._verifier.has_unverified
        if is_due or any(peer.error for peer in self._peers):
            return 0.0
        deadlines = [peer.handshake_deadline for peer in self._peers if not peer.is_ready]
        if len(self._loads) or self._waits:
            deadlines += [peer.next_heartbeat for peer in self._peers if peer.is_ready]
        return min(deadlines + self._loads.deadlines(), default=None)

    # Peers

    def _notifications(self) -> Iterator[tuple[Peer, side_channel.Publish]]:
        """Yield (peer, PUBLISH) for each notification of a producer's write.

        An invalid notification is ignored. It does not fail the peer, because any agent can send a
        notification under the peer's name.
        """
        for sender, messages in self._agent.get_new_notifs().items():
            for peer in self._peers:
                if peer.is_ready and peer.agent_name == sender:
                    for message in messages:
                        with contextlib.suppress(msgspec.DecodeError):
                            yield peer, side_channel.decode_notification(message)

    def _lose(self, peer: Peer, now: float) -> None:
        """Disconnect a lost peer and fail the loads that need it. Later loads may connect again."""
        self._peers.remove(peer)
        self._waits = {
            transfer_id: lead_peer
            for transfer_id, lead_peer in self._waits.items()
            if lead_peer is not peer
        }
        for load in self._loads:
            if peer in load.peers:
                self._loads.fail(load, peer.reason, peer.error, now)
        self._verifier.drop_peer(peer)

    def _fence_needed(self, now: float) -> str:
        """Return why a fence (`Agent.fence`) is needed now; empty if no fence is needed."""
        settling = [load for load in self._loads if load.state is LoadState.SETTLING]
        for load in settling:
            if now >= load.settle_deadline:
                reason = load.error or "the producer did not confirm the end of its writes"
                return f"transfer {load.transfer_id} did not end in time: {reason}"
        # A lost peer cannot confirm its last write, so only a fence ends the loads from this peer.
        # The fence would also fail other loads, so it waits until all loads are SETTLING.
        if len(settling) == len(self._loads):
            for load in settling:
                for rank_transfer in load.rank_transfers:
                    if rank_transfer.may_write and rank_transfer.peer.error:
                        return f"transfer {load.transfer_id}: {rank_transfer.peer.error}"
        return ""

    def _fence(self, why: str, now: float) -> None:
        """Cut all peers off from this engine's memory, end all loads and disconnect all peers."""
        logger.warning(
            "all peers are cut off from the KV memory, which fails all running loads; later loads "
            "connect again: %s",
            why,
        )
        self._has_fenced = True
        self._context.stats.memory_fences += 1
        self._agent.fence()
        if self._verifier.is_reading:
            raise RuntimeError("transfers continue after a fence: the transport is defective")
        self._verifier.discard_all()
        self._context.drop_local_slot_descs()
        for load in self._loads:
            self._loads.fail(
                load, FailureReason.PEER_LOST, f"peers were cut off from the KV memory: {why}", now
            )
            for rank_transfer in load.rank_transfers:
                self._loads.release(rank_transfer)
                rank_transfer.end_writes()
            self._loads.advance(load, now)
        for peer in self._peers:
            self._peers.remove(peer)
            self._verifier.drop_peer(peer)
        self._waits.clear()
        self._peers.describe_memory()

    def _send_heartbeats(self, now: float) -> None:
        due = [peer for peer in self._peers if peer.is_ready and now >= peer.next_heartbeat]
        if not due:
            return
        transfer_ids: dict[Peer, list[str]] = defaultdict(list)
        for transfer_id, lead_peer in self._waits.items():
            workers, _ = self._peers.connect_workers(lead_peer, now)
            for peer in workers.values():
                transfer_ids[peer].append(transfer_id)
        for load in self._loads:
            for rank_transfer in load.rank_transfers:
                if not rank_transfer.is_released:
                    transfer_ids[rank_transfer.peer].append(load.transfer_id)
        for peer in due:
            peer.next_heartbeat = now + self._loads.heartbeat_s(peer)
            if transfer_ids[peer]:
                peer.send(side_channel.Heartbeat(transfer_ids[peer]))
