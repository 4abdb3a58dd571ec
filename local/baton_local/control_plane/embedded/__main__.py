"""Run the embedded control plane as a process: `python -m baton_local.control_plane.embedded --state-dir D [--port N]`.

Prints the kubeconfig's path when it answers requests; ends on SIGTERM or SIGINT.
"""

from __future__ import annotations

import argparse
import logging
import signal
import threading
from pathlib import Path

from baton_protocol.arguments import port

from . import DEFAULT_SERVICE_NETWORK, EmbeddedControlPlane


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m baton_local.control_plane.embedded", description=__doc__
    )
    parser.add_argument(
        "--state-dir",
        type=Path,
        required=True,
        help="where certificates and the kubeconfig are written",
    )
    parser.add_argument("--host", default="127.0.0.1", help="loopback address to listen on")
    parser.add_argument("--port", type=port, default=0, help="0 takes a free port")
    parser.add_argument(
        "--service-network", default=DEFAULT_SERVICE_NETWORK, help="addresses of Services"
    )
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    arguments.state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    ending = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ending.set())
    plane = EmbeddedControlPlane(
        arguments.state_dir, arguments.host, arguments.port, arguments.service_network
    )
    plane.start()
    print(plane.kubeconfig, flush=True)
    while not ending.wait(0.5):
        plane.check()
    plane.stop()


if __name__ == "__main__":
    main()
