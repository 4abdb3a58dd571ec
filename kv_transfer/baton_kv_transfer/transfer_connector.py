"""The worker side of the KV connector.

One thread runs the consumer side and the producer side over one agent. The thread sleeps until a
socket, the agent, a command or a deadline wakes it. The engine's thread only queues commands and
takes results.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import msgspec
import zmq

from baton_kv_transfer.agent.agent_factory import create_agent
from baton_kv_transfer.connector import (
    ConnectorMetadata,
    ConnectorOutput,
    ConnectorStats,
    KVConnectorWorker,
    LoadResult,
)
from baton_kv_transfer.connector_context import ConnectorContext
from baton_kv_transfer.consumer.consumer_side import ConsumerSide
from baton_kv_transfer.memory.layout import RankAddress
from baton_kv_transfer.memory.slot_memory import SlotMemory
from baton_kv_transfer.producer.producer_side import ProducerSide, open_router
from baton_kv_transfer.transports.ucx.capabilities import require_rdma
from baton_protocol.block_hash import BlockHash
from baton_protocol.options.config import KVRole, KVTransferConfig
from baton_protocol.service_key import ServiceKey

logger = logging.getLogger(__name__)

JOIN_TIMEOUT_S = 10.0
MAX_SLEEP_S = 1.0


class TransferConnector(KVConnectorWorker):
    """The connector of one worker: a thread that runs the worker's transfers over an agent."""

    def __init__(
        self,
        config: KVTransferConfig,
        *,
        instance_id: str,
        compatibility_hash: str,
        host: str,
        rank: int = 0,
        service_key: ServiceKey | None = None,
    ) -> None:
        """Create the agent and, for a producer, bind the side channel.

        No peer is served before `register_kv_cache`.

        Args:
            config: the engine's kv_transfer section.
            instance_id: id of this engine process.
            compatibility_hash: hash of the settings that peers must share, see
                `baton_protocol.options.config`.
            host: the pod's own address, to which the side channel is bound. Rank 0 uses config.port
                (0: any free port). Other ranks use any free port.
            rank: rank of this worker in its engine. The transfer agent is called
                `<instance_id>/<rank>`.
            service_key: peers without this key are refused. None: peers with a key are refused.

        Raises:
            ValueError: the role is none, the transport is unknown, or it is nixl and NIXL is not
                installed. Also if config.rdma is set and UCX lacks verbs or an RDMA device.
            OSError: the address of the side channel is in use or not of this machine.
            UCXError: UCX is missing or cannot start.
        """
        if config.role is KVRole.NONE:
            raise ValueError(
                "kv_transfer.role is none: an engine that transfers nothing needs no connector"
            )
        if config.rdma:
            require_rdma()
        self._config = config
        self._instance_id = instance_id
        self._compatibility_hash = compatibility_hash
        self._service_key = service_key
        self._host = host
        self._agent = create_agent(f"{instance_id}/{rank}", config.transport, host)
        #: Keys of `_count_bytes` that were logged.
        self._logged_transports: set[str] = set()
        self._lock = threading.Lock()
        #: Calls of `start` and `save` that the connector's thread carries out: method, argument.
        self._commands: deque[tuple[Callable[[ConnectorMetadata], None], ConnectorMetadata]] = (
            deque()
        )
        self._output = ConnectorOutput()
        self._stats = ConnectorStats()
        self._user_wakeup: Callable[[], None] = lambda: None
        self._fd_lock = threading.Lock()  # the descriptor must not be closed during a write
        self._num_blocks = 0
        self._running = False
        self._stopping = False
        self._producer: ProducerSide | None = None
        self._consumer: ConsumerSide | None = None
        self._router: zmq.Socket[bytes] | None = None
        self.port = 0
        if config.role is not KVRole.CONSUMER:
            self._bind(config.port if rank == 0 else 0)
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._agent.set_wakeup(self._wake)
        self._thread = threading.Thread(target=self._run, name="kv-connector", daemon=True)

    def _bind(self, port: int) -> None:
        """Bind the side channel to `port`, or to any free port if `port` is 0.

        If this fails, close the agent.
        """
        try:
            self._router = open_router(f"tcp://{self._host}:{port or '*'}", self._service_key)
        except OSError:
            self._agent.close()
            raise
        endpoint = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self.port = int(endpoint.rsplit(":", 1)[1])

    # Called by the engine's thread

    def register_kv_cache(self, memory: SlotMemory, ranks: Sequence[RankAddress] = ()) -> None:
        if self._running:
            raise ValueError("a KV cache was registered before: one connector serves one memory")
        layout = memory.layout
        num_heads = sum(address.heads.count for address in ranks)
        if ranks and num_heads != layout.num_model_heads:
            raise ValueError(
                f"the {len(ranks)} workers of this engine have {num_heads} KV heads, the model has "
                f"{layout.num_model_heads}: workers that share a head cannot transfer KV blocks"
            )
        region = (
            memory.base_address,
            memory.num_slots * layout.block_nbytes,
            memory.device_id,
            "kv",
        )
        self._agent.register_memory([region], memory.mem_type)
        context = ConnectorContext(
            self._config,
            self._instance_id,
            self._compatibility_hash,
            self._service_key,
            self._agent,
            memory,
            list(ranks) or [RankAddress(self._host, self.port, layout.heads)],
            self._stats,
        )
        if self._config.role is not KVRole.PRODUCER:
            self._consumer = ConsumerSide(context)
        if self._router is not None:
            self._producer = ProducerSide(context, self._router)
        self._num_blocks = layout.num_blocks
        self._running = True
        self._thread.start()

    def start(self, metadata: ConnectorMetadata) -> None:
        role = self._config.role
        if (metadata.offers and role is KVRole.CONSUMER) or (
            (metadata.loads or metadata.waits) and role is KVRole.PRODUCER
        ):
            what = "offer transfers" if role is KVRole.CONSUMER else "load blocks"
            raise ValueError(f"an engine with kv_transfer.role={role.value} cannot {what}")
        for load in metadata.loads:
            self._check_blocks(load.transfer_id, load.block_ids, load.block_hashes)
        if metadata.offers or metadata.loads or metadata.cancels or metadata.waits:
            self._queue(self._start, metadata)

    def save(self, metadata: ConnectorMetadata) -> None:
        if metadata.saves and self._config.role is KVRole.CONSUMER:
            raise ValueError("an engine with kv_transfer.role=consumer cannot publish blocks")
        for save in metadata.saves:
            self._check_blocks(save.transfer_id, save.block_ids, save.block_hashes)
        if metadata.saves:
            self._queue(self._save, metadata)

    def get_finished(self) -> ConnectorOutput:
        with self._lock:
            output, self._output = self._output, ConnectorOutput()
        return output

    def set_wakeup(self, wakeup: Callable[[], None]) -> None:
        self._user_wakeup = wakeup

    def stats(self) -> ConnectorStats:
        counted = self._stats
        return msgspec.structs.replace(
            counted,
            failures=dict(counted.failures),
            failure=counted.failure or self._agent.failure,
            descriptors_refused=counted.descriptors_refused + self._agent.num_refused,
            bytes_moved=self._count_bytes(),
        )

    def _count_bytes(self) -> dict[str, int]:
        """Return the bytes moved, by transport, mechanism and device, such as `ucx tcp/lo`.

        NIXL does not report bytes. With NIXL, the key `nixl unknown` has the bytes of the verified
        and the written blocks.
        """
        moved = self._agent.bytes_moved
        total = self._stats.bytes_sent + self._stats.bytes_received
        if moved is None:
            return {"nixl unknown": total} if total else {}
        return moved

    def shutdown(self) -> None:
        if self._stopping:
            return
        self._stopping = True
        self._wake()
        if self._running:
            self._thread.join(JOIN_TIMEOUT_S)
            if self._thread.is_alive():
                logger.error("the KV connector's thread did not end within %.0f s", JOIN_TIMEOUT_S)
                return
        else:
            self._close()
        with self._fd_lock:
            os.close(self._wake_fd)
            self._wake_fd = -1

    def _check_blocks(
        self, transfer_id: str, block_ids: list[int], block_hashes: list[BlockHash]
    ) -> None:
        """Check that the block ids exist, and that there is one hash for each block id.

        Raises:
            ValueError: an id is out of range, or there are more or fewer hashes than ids.
        """
        wrong = [block_id for block_id in block_ids if not 0 <= block_id < self._num_blocks]
        if wrong or len(block_ids) != len(block_hashes):
            raise ValueError(
                f"transfer {transfer_id}: {len(block_ids)} block ids with {len(block_hashes)} "
                f"hashes, ids outside [0, {self._num_blocks}): {wrong}"
            )

    # Between the threads

    def _queue(self, run: Callable[[ConnectorMetadata], None], metadata: ConnectorMetadata) -> None:
        if not self._running or self._stopping:
            raise ValueError("the connector is not running: call register_kv_cache first")
        self._commands.append((run, metadata))
        self._wake()

    def _wake(self) -> None:
        with self._fd_lock:
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)

    def _report(self, output: ConnectorOutput) -> None:
        """Add `output` to the result of the next `get_finished`, and wake the engine."""
        if output:
            for name in self._count_bytes().keys() - self._logged_transports:
                self._logged_transports.add(name)
                logger.info("KV blocks travel by %s (transport, mechanism and device)", name)
            with self._lock:
                self._output.finished_sending |= output.finished_sending
                self._output.load_results |= output.load_results
            self._user_wakeup()

    # The connector's thread

    def _run(self) -> None:
        try:
            self._loop()
        except Exception as error:
            logger.exception(
                "the KV connector failed: all KV transfers of this engine fail, and so do later "
                "ones; restart the engine"
            )
            self._stats.failure = f"the KV connector failed: {error!r}"
            self._fail_from_now_on(self._stats.failure)
        self._close()

    def _loop(self) -> None:
        while not self._stopping:
            self._sleep()
            while self._commands:
                run, metadata = self._commands[0]
                run(metadata)
                # Remove the command only after its success. If the command fails,
                # _fail_from_now_on reports the results of its transfers.
                self._commands.popleft()
            if self._producer is not None:
                self._report(ConnectorOutput(set(self._producer.run_round(time.monotonic()))))
            if self._consumer is None:
                self._agent.get_new_notifs()  # discards them: none are expected
                continue
            for transfer_id, result in self._consumer.run_round(time.monotonic()):
                self._report(ConnectorOutput(load_results={transfer_id: result}))
            if self._consumer.take_fence() and self._producer is not None:
                self._producer.fail_push_sessions()

    def _sleep(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake_fd, zmq.POLLIN)
        deadlines = []
        if self._router is not None and self._producer is not None:
            poller.register(self._router, zmq.POLLIN)
            deadlines.append(self._producer.next_deadline())
        if self._consumer is not None:
            for peer in self._consumer.peers():
                poller.register(peer.socket, zmq.POLLIN)
                poller.register(peer.monitor, zmq.POLLIN)
            deadlines.append(self._consumer.next_deadline())
        due = [deadline for deadline in deadlines if deadline is not None]
        wait_s = min(MAX_SLEEP_S, max(0.0, min(due) - time.monotonic())) if due else MAX_SLEEP_S
        with self._agent.waiting() as agent_fd:
            if agent_fd is not None:
                poller.register(agent_fd, zmq.POLLIN)
            ready = poller.poll(int(wait_s * 1000) + 1)
        if any(waited == self._wake_fd for waited, _ in ready):
            os.eventfd_read(self._wake_fd)

    def _start(self, metadata: ConnectorMetadata) -> None:
        if self._producer is not None:
            for transfer_id, peer_instance_id in metadata.offers.items():
                self._producer.transfers.offer(transfer_id, peer_instance_id)
            for transfer_id in metadata.cancels:
                self._producer.transfers.cancel(transfer_id)
        if self._consumer is not None:
            for transfer_id, wait in metadata.waits.items():
                self._consumer.add_wait(transfer_id, wait)
            for load in metadata.loads:
                self._consumer.begin(load)
            for transfer_id in metadata.cancels:
                self._consumer.cancel(transfer_id)

    def _save(self, metadata: ConnectorMetadata) -> None:
        assert self._producer is not None, "`save` refuses the role consumer"
        for save in metadata.saves:
            self._producer.transfers.save(save)

    def _fail_from_now_on(self, reason: str) -> None:
        """Close the agent. Until shutdown, fail every load and end every offered transfer."""
        self._agent.close()  # nothing writes to the engine's memory any more
        if self._consumer is not None:
            self._report(ConnectorOutput(load_results=dict(self._consumer.fail_all(reason))))
        if self._producer is not None:
            self._report(ConnectorOutput(set(self._producer.transfers.end_all())))
        poller = zmq.Poller()
        poller.register(self._wake_fd, zmq.POLLIN)
        while not self._stopping:
            if poller.poll(int(MAX_SLEEP_S * 1000)):
                os.eventfd_read(self._wake_fd)
            while self._commands:
                _, metadata = self._commands.popleft()
                results = {load.transfer_id: LoadResult(0, reason) for load in metadata.loads}
                self._report(ConnectorOutput(set(metadata.offers), results))

    def _close(self) -> None:
        for name, nbytes in self._count_bytes().items():
            logger.info("%s moved %.2f MiB of KV blocks", name, nbytes / 2**20)
        if self._consumer is not None:
            self._consumer.close()
        if self._producer is not None:
            self._producer.close()
        elif self._router is not None:
            self._router.close(linger=0)
        self._agent.close()
