"""Run the kubelet: see `python -m pocketkube.kubelet --help`."""

from __future__ import annotations

import argparse
import socket
from pathlib import Path

from pocketkube.containers.backoff import BackoffPolicy
from pocketkube.kubelet.kubelet import Kubelet, KubeletConfig
from pocketkube.lifecycle import die_with_parent, run_until_terminated
from pocketkube.networks import POD_RANGES


def main() -> None:
    """Parse the command line, and run the kubelet until SIGTERM."""
    parser = argparse.ArgumentParser(
        prog="python -m pocketkube.kubelet",
        description="Run the pods of one node as processes of this machine.",
    )
    parser.add_argument("--kubeconfig", type=Path, required=True)
    parser.add_argument(
        "--state-dir",
        type=Path,
        required=True,
        help="pod folders, volumes and logs; one kubelet per folder",
    )
    parser.add_argument("--node-name", default=socket.gethostname().lower())
    parser.add_argument(
        "--address-pool",
        default=POD_RANGES["embedded"],
        help=(
            "network of the pods' addresses; addresses outside of 127.0.0.0/8 are added to the "
            "loopback device (needs root)"
        ),
    )
    parser.add_argument(
        "--host-root",
        type=Path,
        help="folder where the paths of hostPath volumes are looked up before /",
    )
    parser.add_argument(
        "--backoff-base",
        type=float,
        default=1.0,
        help="seconds before the first restart of a container",
    )
    parser.add_argument(
        "--backoff-cap", type=float, default=30.0, help="maximum seconds before a restart"
    )
    parser.add_argument(
        "--refresh",
        type=float,
        default=10.0,
        help="seconds between refreshes of configMap, secret and token files",
    )
    args = parser.parse_args()
    die_with_parent()
    config = KubeletConfig(
        kubeconfig=args.kubeconfig,
        state_dir=args.state_dir.absolute(),
        node_name=args.node_name,
        address_pool=args.address_pool,
        host_root=args.host_root and args.host_root.absolute(),
        backoff=BackoffPolicy(args.backoff_base, args.backoff_cap),
        refresh_s=args.refresh,
    )
    run_until_terminated(Kubelet(config).run, name="kubelet", stop_timeout_s=20.0)


if __name__ == "__main__":
    main()
