"""The operator's process: watches and reconciles while it holds the Lease."""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import signal
import sys
import threading
import uuid
from collections.abc import Collection

from baton_operator.builders.restrictions import Restrictions
from baton_operator.kube.objects import Kube
from baton_operator.process.kopf_thread import run_first_of, watch
from baton_operator.process.leader import Election, Elector
from baton_operator.process.operator_metrics import serve
from baton_operator.process.runtime import Runtime, open_runtime

#: Recursion limit of Python, which also applies to JSON parsers. API servers accept objects of
#: 10,000 nested levels.
MAX_RECURSION = 12_000
#: Stack size of each thread, in bytes. A recursive parser needs it to reach MAX_RECURSION.
STACK_BYTES = 2**26


def allow_deep_objects() -> None:
    """Let this process read objects of any depth that API servers accept.

    Without this call, one deeply nested LLMService would make each watch and list fail. Call this
    function before other threads start, because threads that already run keep their stack size.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
    if soft != resource.RLIM_INFINITY:
        wanted = max(soft, STACK_BYTES)
        resource.setrlimit(
            resource.RLIMIT_STACK,
            (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard),
        )
    threading.stack_size(STACK_BYTES)
    sys.setrecursionlimit(MAX_RECURSION)


async def run(args: argparse.Namespace, restrictions: Restrictions | None) -> None:
    """Run the operator until SIGTERM or SIGINT.

    Args:
        args: as parsed by `cli`.
        restrictions: what LLMServices may request. None: everything.

    Raises:
        ConfigException: no cluster is configured.
        AddressError: the HTTP port cannot be used.
        LeaseLostError: another process may hold the Lease.
        KopfHangsError: kopf did not stop.
    """
    allow_deep_objects()
    stop = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    operator_namespace = os.environ.get("POD_NAMESPACE") if args.kubeconfig is None else None
    async with (
        open_runtime(args.kubeconfig, restrictions, args.resync, operator_namespace) as runtime,
        serve(args.host, args.http_port, runtime.metrics, runtime.explain_stuck),
    ):
        if not args.leader_elect:
            runtime.metrics.leader.set(1)
            await run_first_of(runtime.run(), watch(runtime, args.namespace), stop.wait())
            return
        identity = f"{os.environ.get('POD_NAME', os.uname().nodename)}_{uuid.uuid4()}"
        election = Election(identity, args.lease_duration)
        lease_client = runtime.kube.client.sibling()  # not limited by `write_timeout_s`
        elector = Elector(Kube(lease_client), election, args.lease_namespace, args.lease_name)
        runtime.kube.client.write_timeout_s = lambda: election.write_timeout_s
        runtime.metrics.leader.set_function(lambda: float(election.held_s > 0))
        try:
            await run_first_of(_lead(elector, runtime, args.namespace), stop.wait())
        finally:
            await elector.release()


async def _lead(elector: Elector, runtime: Runtime, namespaces: Collection[str]) -> None:
    """Acquire the Lease, then watch and reconcile while this process holds it.

    Raises:
        LeaseLostError: another process may hold the Lease.
        KopfHangsError: kopf did not stop.
    """
    await elector.acquire()
    # `elector.keep` comes last, so that it is cancelled last. The Lease is renewed until the
    # reconciles, which may still write, have ended.
    await run_first_of(runtime.run(), watch(runtime, namespaces), elector.keep())
