"""Run a cluster of processes on this machine: see `python -m pocketkube --help`."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from pocketkube.cluster import LocalCluster
from pocketkube.lifecycle import run_until_terminated
from pocketkube.ports import parse_port

START_TIMEOUT_S = 60.0  # longest wait for the API server
HEAL_INTERVAL_S = 0.5  # interval of the check whether a component has ended


def main() -> None:
    """Parse the command line, and run the cluster until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(
        prog="python -m pocketkube",
        description="Run a Kubernetes cluster whose pods are processes of this machine. "
        "Prints the kubeconfig's path once the API server answers.",
    )
    parser.add_argument(
        "--state-dir",
        type=Path,
        required=True,
        help="folder for the kubeconfig, keys, logs and pods; one cluster per folder",
    )
    parser.add_argument(
        "--control-plane",
        choices=("embedded", "real"),
        default="embedded",
        help="the API server: pocketkube's own, or kube-apiserver with etcd",
    )
    parser.add_argument(
        "--ingress-port",
        type=parse_port,
        default=0,
        help="port of the Ingress proxy; 0: a free port",
    )
    parser.add_argument("--node-name", default="pocketkube")
    args = parser.parse_args()
    cluster = LocalCluster(
        args.state_dir.absolute(),
        control_plane=args.control_plane,
        ingress_port=args.ingress_port,
        node_name=args.node_name,
    )

    async def run(stop: asyncio.Event) -> None:
        try:
            await cluster.start_control_plane(START_TIMEOUT_S)
            cluster.start_node()
            print(cluster.kubeconfig, flush=True)
            while not stop.is_set():
                cluster.heal()
                await asyncio.sleep(HEAL_INTERVAL_S)
        finally:
            cluster.stop()

    run_until_terminated(run, name="pocketkube", stop_timeout_s=60.0)


if __name__ == "__main__":
    main()
