"""Run the controllers: see `python -m pocketkube.controllers --help`."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from baton_kube.client import connect
from pocketkube.controllers.controller_manager import Controllers
from pocketkube.lifecycle import die_with_parent, run_until_terminated


def main() -> None:
    """Parse the command line, and run the controllers until SIGTERM."""
    parser = argparse.ArgumentParser(
        prog="python -m pocketkube.controllers",
        description="Deployments, ReplicaSets and scheduling for the embedded control plane.",
    )
    parser.add_argument("--kubeconfig", type=Path, required=True)
    args = parser.parse_args()
    die_with_parent()

    async def run(stop: asyncio.Event) -> None:
        async with connect(args.kubeconfig) as api:
            await Controllers(api).run(stop)

    run_until_terminated(run, name="controllers", stop_timeout_s=10.0)


if __name__ == "__main__":
    main()
