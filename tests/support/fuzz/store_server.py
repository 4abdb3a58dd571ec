"""Script that runs a rendezvous store at $POD_IP until it is killed.

For the fuzz test of the store.

python -m support.fuzz.store_server [KEY_FILE]
"""

from __future__ import annotations

import logging
import signal
import sys

from baton_engine.distributed.store.handshake import store_secret
from baton_engine.distributed.store.store_server import open_store
from baton_protocol.service_key import ServiceKey

PORT = 29500


def main() -> None:
    logging.basicConfig(level=logging.INFO)
    key = ServiceKey.load(sys.argv[1]) if len(sys.argv) > 1 else None
    open_store(port=PORT, secret=store_secret(key))
    signal.pause()


if __name__ == "__main__":
    main()
