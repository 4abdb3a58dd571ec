"""Script that runs the link of a rank at $POD_IP until it is killed.

For the fuzz test of the coordinator.

It logs its port, and the wave of each StartWave that has the nonce HONEST.

python -m support.fuzz.link_server [KEY_FILE]
"""

from __future__ import annotations

import logging
import signal
import sys

from baton_engine.elastic.rank.rank_link import RankLink
from baton_protocol.options.config import pod_ip
from baton_protocol.service_key import ServiceKey
from baton_protocol.topology import Directive, StartWave

HONEST = "1.honest"
logger = logging.getLogger(__name__)


def deliver(message: Directive | StartWave) -> None:
    if isinstance(message, StartWave) and message.nonce == HONEST:
        logger.info("wave %d.", message.wave)


def main() -> None:
    logging.basicConfig(level=logging.INFO)
    key = ServiceKey.load(sys.argv[1]) if len(sys.argv) > 1 else None
    link = RankLink(pod_ip(), f"{pod_ip()}:1", deliver=deliver, key=key)
    link.start()
    logger.info("port %d.", link.port)
    signal.pause()


if __name__ == "__main__":
    main()
