"""The command line of the operator, `baton-operator`."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import sys

from kubernetes.aio.config import ConfigException

from baton_operator import handlers as handlers  # registers the handlers of kopf
from baton_operator import logs, names
from baton_operator.builders.restrictions import Restrictions
from baton_operator.process.kopf_thread import KopfHangsError
from baton_operator.process.leader import LeaseLostError
from baton_operator.process.operator_metrics import AddressError
from baton_operator.process.operator_process import run
from baton_operator.process.runtime import RESYNC_S
from baton_protocol.options import arguments
from baton_protocol.options.config import pod_ip
from baton_protocol.process.fatal import report_fatal

logger = logging.getLogger("baton_operator")

LEASE_S = 15
HTTP_PORT = 8081


def main(argv: list[str] | None = None) -> None:
    """Run the `baton-operator` command.

    Exit code 78 means that the cluster cannot be accessed with this configuration. The last line of
    stderr is then `FATAL <Reason>: <message>`. Exit code 1 means that the Lease was lost, kopf did
    not stop, or the HTTP port cannot be used.
    """
    parser = _parser()
    args = parser.parse_args(argv)
    if args.leader_elect is None:
        args.leader_elect = args.kubeconfig is None
    if args.leader_elect and not args.lease_namespace:
        parser.error("--leader-elect needs --lease-namespace where $POD_NAMESPACE is not set")
    try:
        restrictions = restrictions_of(args)
    except ValueError as error:
        parser.error(str(error))
    logs.configure(args.log_format, args.log_level)
    # Modules are never freed. A garbage collection that visits them would stall the event loop for
    # 0.04 to 0.24 s.
    gc.freeze()
    try:
        asyncio.run(run(args, restrictions))
    except KopfHangsError as error:
        logger.error("the operator exits with code 1: %s", error)
        os._exit(1)  # sys.exit would wait for kopf's threads
    except (LeaseLostError, AddressError) as error:
        logger.error("the operator exits with code 1: %s", error)
        sys.exit(1)
    except ConfigException as error:
        hint = "" if args.kubeconfig else "; outside a cluster set --kubeconfig"
        sys.exit(report_fatal("ConfigurationError", f"cannot access the cluster: {error}{hint}"))
    except KeyboardInterrupt:
        sys.exit(130)


def restrictions_of(args: argparse.Namespace) -> Restrictions | None:
    """Return the restrictions on LLMServices, according to the flags. None: no restrictions.

    An operator of all namespaces is restricted by default, because it may have several tenants.

    Raises:
        ValueError: a flag is invalid.
    """
    restrictions = Restrictions(
        host_paths=tuple(args.host_path), annotation_prefixes=tuple(args.annotation_prefix)
    )
    default = "unrestricted" if args.namespace else "restricted"
    return restrictions if (args.templates or default) == "restricted" else None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="baton-operator", description="Runs LLMServices on Kubernetes."
    )
    add = parser.add_argument
    add(
        "--kubeconfig",
        metavar="FILE",
        help="access to the cluster; default: the pod's service account",
    )
    add(
        "--namespace",
        action="append",
        default=[],
        metavar="NS",
        help="watch this namespace only; can be repeated; default: all namespaces",
    )
    add(
        "--templates",
        choices=["restricted", "unrestricted"],
        help="restricted: refuse LLMServices that request more than the restricted Pod Security "
        "profile allows; default: restricted, or unrestricted with --namespace",
    )
    add(
        "--host-path",
        action="append",
        default=[],
        metavar="DIR",
        help="folder of nodes that restricted LLMServices may use; DIR/: to read only, with all "
        "folders below it; can be repeated; default: none",
    )
    add(
        "--annotation-prefix",
        action="append",
        default=[],
        metavar="PREFIX",
        help="beginning of annotations, and of labels with a domain, that restricted "
        "LLMServices may set on pods and the Ingress; can be repeated; default: none",
    )
    add(
        "--host",
        default=pod_ip(),
        help="address of /health and /metrics; default: $POD_IP, else loopback",
    )
    add(
        "--http-port",
        type=arguments.port,
        default=HTTP_PORT,
        help="port of /health and /metrics (default: %(default)s)",
    )
    add(
        "--resync",
        type=arguments.positive,
        default=RESYNC_S,
        metavar="S",
        help="seconds between two reconciles of a service without an event (default: %(default)s)",
    )
    add(
        "--leader-elect",
        action=argparse.BooleanOptionalAction,
        help="reconcile only while holding a Lease; default: if the operator is a pod",
    )
    add(
        "--lease-namespace",
        default=os.environ.get("POD_NAMESPACE"),
        metavar="NS",
        help="namespace of the Lease; default: $POD_NAMESPACE",
    )
    add(
        "--lease-name",
        default=names.MANAGER,
        metavar="NAME",
        help="name of the Lease (default: %(default)s)",
    )
    add(
        "--lease-duration",
        type=arguments.positive,
        default=LEASE_S,
        metavar="S",
        help="seconds without a renewal before another operator takes over (default: %(default)s)",
    )
    add(
        "--log-level",
        default="info",
        choices=["debug", "info", "warning", "error"],
        help="least severe messages that are logged (default: %(default)s)",
    )
    add(
        "--log-format",
        default="text",
        choices=["json", "text"],
        help="format of log lines (default: %(default)s)",
    )
    return parser


if __name__ == "__main__":
    main()
