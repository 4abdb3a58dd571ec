"""Run the proxies: see `python -m pocketkube.proxy --help`."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from baton_kube.client import connect
from baton_kube.reflector import Reflector
from pocketkube.event_recorder import EventRecorder
from pocketkube.lifecycle import die_with_parent, run_until_terminated, until_stopped
from pocketkube.loopback import LoopbackAddresses
from pocketkube.ports import LOOPBACK, parse_port
from pocketkube.proxy.ingress_proxy import INGRESSES, IngressProxy
from pocketkube.proxy.service_proxy import ServiceProxy


def main() -> None:
    """Parse the command line, and run the proxies until SIGTERM."""
    parser = argparse.ArgumentParser(
        prog="python -m pocketkube.proxy",
        description="Service and Ingress proxy of a local cluster.",
    )
    parser.add_argument("--kubeconfig", type=Path, required=True)
    parser.add_argument(
        "--ingress-port",
        type=parse_port,
        default=0,
        help="0 lets the system choose a port, which the log shows",
    )
    args = parser.parse_args()
    die_with_parent()
    run_until_terminated(
        lambda stop: _run(stop, args.kubeconfig.absolute(), args.ingress_port),
        name="proxy",
        stop_timeout_s=10.0,
    )


async def _run(stop: asyncio.Event, kubeconfig: Path, port: int) -> None:
    # The folder of the kubeconfig holds the state of one cluster. The file there records the
    # addresses that a killed proxy has left.
    loopback = LoopbackAddresses(kubeconfig.with_name("proxy-addresses.json"))
    loopback.remove_stale()
    async with connect(kubeconfig) as api:
        services = Reflector(api, "/api/v1/services")
        pods = Reflector(api, "/api/v1/pods")
        ingresses = Reflector(api, INGRESSES)
        nodes = Reflector(api, "/api/v1/nodes")
        events = EventRecorder(api, "pocketkube-proxy")
        proxy = ServiceProxy(services, pods, events, loopback)
        ingress = IngressProxy(api, ingresses, nodes, services, proxy)
        caches = (services.run(), pods.run(), ingresses.run(), nodes.run())
        await until_stopped(stop, *caches, events.run(), proxy.run(), ingress.run(LOOPBACK, port))


if __name__ == "__main__":
    main()
