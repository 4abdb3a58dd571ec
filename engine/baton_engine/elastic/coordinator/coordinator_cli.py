"""`baton-coordinator`: runs the coordinator of one expert-parallel group until SIGTERM."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import sys

import zmq

from baton_engine.elastic.coordinator.controller_config import ControllerConfig
from baton_engine.elastic.coordinator.coordinator import Coordinator
from baton_protocol.options import arguments
from baton_protocol.options.config import pod_ip
from baton_protocol.process.fatal import report_fatal
from baton_protocol.service_key import ServiceKey, ServiceKeyError
from baton_protocol.topology import COORDINATOR_HTTP_PORT, COORDINATOR_PORT

logger = logging.getLogger(__name__)


def main(argv: list[str] | None = None) -> int:
    """Run the coordinator until SIGTERM or SIGINT, and return the exit code.

    The exit code is 1 if a port cannot be bound, and 78 if the service key cannot be read.
    """
    args = _parser().parse_args(argv)
    host, port, http_port = pod_ip(), args.port, args.http_port
    logging.basicConfig(
        level=args.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s [%(threadName)s] %(message)s",
        stream=sys.stderr,
    )
    try:
        key = ServiceKey.load(args.service_key_file)
    except ServiceKeyError as error:
        return report_fatal("ConfigurationError", error)
    config = ControllerConfig(
        **{field.name: getattr(args, field.name) for field in dataclasses.fields(ControllerConfig)}
    )
    try:
        coordinator = Coordinator(host, port, http_port, config, key)
    except (OSError, zmq.ZMQError) as error:
        logger.error(
            "the coordinator cannot bind ports %d and %d of %s: %s", port, http_port, host, error
        )
        return 1
    coordinator.install_signal_handlers()
    logger.info(
        "the coordinator listens on %s: port %d, http port %d",
        host,
        coordinator.port,
        coordinator.http_port,
    )
    return coordinator.run()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="baton-coordinator",
        description=__doc__,
        epilog="The coordinator binds $POD_IP, or 127.0.0.1 if POD_IP is not set.",
    )
    parser.add_argument(
        "--port",
        type=arguments.port,
        default=COORDINATOR_PORT,
        help="port for the ranks; 0: any free port",
    )
    parser.add_argument(
        "--http-port",
        type=arguments.port,
        default=COORDINATOR_HTTP_PORT,
        help="port of health, metrics and topology; 0: any free port",
    )
    parser.add_argument(
        "--service-key-file",
        default="",
        metavar="FILE",
        help="key of the service: ranks need it, and HTTP requests that change the topology need "
        "its bearer token",
    )
    parser.add_argument(
        "--log-level",
        default="info",
        choices=["debug", "info", "warning", "error"],
        help="least severe messages that are logged",
    )
    for field in dataclasses.fields(ControllerConfig):
        flag = f"--{field.name.replace('_', '-')}"
        parser.add_argument(
            flag, type=arguments.not_negative, default=field.default, help="default: %(default)s"
        )
    return parser


if __name__ == "__main__":
    sys.exit(main())
