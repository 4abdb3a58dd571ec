"""Script that runs the KV connector of a worker at $POD_IP until it is killed.

For the fuzz test of KV transfers.

The connector offers TRANSFERS, and offers each of them again after its end. The log has the numbers
of refused handshakes and descriptors.

python -m support.fuzz.kv_server TRANSPORT [KEY_FILE]
"""

from __future__ import annotations

import logging
import sys
import threading

import numpy as np

from baton_kv_transfer.connector import BlockSave, ConnectorMetadata
from baton_kv_transfer.memory.layout import KVCacheLayout
from baton_kv_transfer.memory.slot_memory import HostMemory
from baton_kv_transfer.transfer_connector import TransferConnector
from baton_protocol.options.config import KV_PORT, KVRole, KVTransferConfig, pod_ip
from baton_protocol.service_key import ServiceKey

LAYOUT = KVCacheLayout(
    num_blocks=16, num_kv_heads=2, num_layers=2, block_size=4, head_dim=8, dtype="float32"
)
SERVER, FUZZER, HONEST = "server", "fuzzer", "honest"
COMPATIBILITY_HASH = "c"
NUM_BLOCKS = 4
CHAIN_HASHES = [b"%016d" % index for index in range(NUM_BLOCKS)]
#: Transfer ids, and the instances to which the transfers are offered.
TRANSFERS = {**{f"t{number}": FUZZER for number in range(4)}, "h": HONEST}
LEASE_S = 5.0
REPORT_S = 0.1
logger = logging.getLogger(__name__)


class Server:
    """The connector, its memory, and the transfers that it offers."""

    def __init__(self, transport: str, key: ServiceKey | None) -> None:
        config = KVTransferConfig(
            role=KVRole.BOTH, transport=transport, port=KV_PORT, lease_s=LEASE_S
        )
        self._connector = TransferConnector(
            config,
            instance_id=SERVER,
            compatibility_hash=COMPATIBILITY_HASH,
            host=pod_ip(),
            service_key=key,
        )
        self._words = np.zeros(LAYOUT.num_blocks * LAYOUT.block_nbytes // 8, dtype=np.uint64)
        self._wake = threading.Event()
        self._connector.set_wakeup(self._wake.set)
        self._connector.register_kv_cache(HostMemory(self._words.ctypes.data, LAYOUT))

    def run(self) -> None:
        reported = (0, 0)
        self._offer(TRANSFERS)
        while True:
            self._wake.wait(REPORT_S)
            self._wake.clear()
            ended = self._connector.get_finished().finished_sending
            self._offer({each: TRANSFERS[each] for each in ended})
            stats = self._connector.stats()
            refused = (stats.handshakes_refused, stats.descriptors_refused)
            if refused != reported:
                logger.info("refused %d handshakes and %d descriptors", *refused)
                reported = refused

    def _offer(self, transfers: dict[str, str]) -> None:
        self._connector.start(ConnectorMetadata(offers=dict(transfers)))
        saves = [
            BlockSave(each, 0, list(range(NUM_BLOCKS)), CHAIN_HASHES, 4 * NUM_BLOCKS, last=True)
            for each in transfers
        ]
        self._connector.save(ConnectorMetadata(saves=saves))


def main() -> None:
    logging.basicConfig(level=logging.INFO)
    key = ServiceKey.load(sys.argv[2]) if len(sys.argv) > 2 else None
    Server(sys.argv[1], key).run()


if __name__ == "__main__":
    main()
