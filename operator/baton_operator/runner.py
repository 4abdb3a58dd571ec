"""The operator's process: holds the Lease, runs kopf and the reconciles, until SIGTERM or SIGINT."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import threading
import time
import uuid
from collections.abc import Collection, Coroutine
from contextlib import suppress
from typing import Any

import kopf

from baton_operator import handlers
from baton_operator.kube import Kube
from baton_operator.leader import Election, Elector
from baton_operator.runtime import Runtime, open_runtime
from baton_operator.server import serve

log = logging.getLogger("baton_operator")

STOP_TIMEOUT_S = 20.0
STOP_TRIES, STOP_TRY_S = 6, 2.0
CHECK_S = 2.0
SILENCE_S = 2 * handlers.WATCH_S + 120.0
"""Every watch is renewed after WATCH_S. When kopf gets no answer for this long, it is started again."""
RESTART_S = 2.0


class KopfHangsError(Exception):
    """kopf did not stop within STOP_TIMEOUT_S. Its thread cannot be ended, so the process must."""


async def run(args: argparse.Namespace) -> None:
    """Run until SIGTERM or SIGINT; arguments as of `cli`.

    Raises:
        ConfigException: there is no way to a cluster.
        AddressError: see `serve`.
        LeaseLostError: another process may work now.
        KopfHangsError
    """
    stop = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    operator_namespace = os.environ.get("POD_NAMESPACE") if args.kubeconfig is None else None
    async with (
        open_runtime(args.kubeconfig, args.resync, operator_namespace) as runtime,
        serve(args.host, args.http_port, runtime.metrics, runtime.stuck),
    ):
        work = _work(runtime, args.namespace)
        if not args.leader_elect:
            runtime.metrics.leader.set(1)
            await _until(stop, work)
            return
        identity = f"{os.environ.get('POD_NAME', os.uname().nodename)}_{uuid.uuid4()}"
        election = Election(identity, args.lease_duration)
        lease_client = runtime.kube.client.sibling()  # it may always write
        elector = Elector(Kube(lease_client), election, args.lease_namespace, args.lease_name)
        runtime.kube.client.write_timeout_s = lambda: election.may_write_s
        runtime.metrics.leader.set_function(lambda: float(election.held_s > 0))
        try:
            await _until(stop, _lead(elector, work))
        finally:
            work.close()
            await elector.release()


async def _until(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> None:
    """Await `work`, or cancel it when `stop` is set. Raises what it raises."""
    task, stopped = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait([task, stopped], return_when=asyncio.FIRST_COMPLETED)
    finally:
        for future in (task, stopped):
            future.cancel()
        await asyncio.wait([task, stopped])
    if not task.cancelled():
        task.result()


async def _lead(elector: Elector, work: Coroutine[Any, Any, None]) -> None:
    """Raises LeaseLostError, and what `work` raises."""
    await elector.acquire()
    keeping, working = asyncio.ensure_future(elector.keep()), asyncio.ensure_future(work)
    try:
        done, _ = await asyncio.wait([keeping, working], return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        working.cancel()
        await asyncio.wait([working])  # the Lease is renewed until then: what is under way may still write
        keeping.cancel()
        await asyncio.wait([keeping])
        if not working.cancelled():
            working.result()


async def _work(runtime: Runtime, namespaces: Collection[str]) -> None:
    """Watch and reconcile until cancelled. Raises KopfHangsError."""
    await runtime.wait_for_crd()
    reconciling = asyncio.ensure_future(runtime.run())
    watching = asyncio.ensure_future(watch(runtime, namespaces))
    try:
        done, _ = await asyncio.wait([reconciling, watching], return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in (reconciling, watching):
            task.cancel()
            await asyncio.wait([task])
        if not watching.cancelled():
            watching.result()


async def watch(runtime: Runtime, namespaces: Collection[str]) -> None:
    """Keep kopf running until cancelled. Raises KopfHangsError.

    kopf ends by itself when a watch is refused for good, as when the CRD is deleted. It waits
    without end when it cannot log in. It looks only once which kinds the API server has.
    """
    while True:
        await runtime.wait_for_crd()
        runtime.answered_at = time.monotonic()
        had_routes = runtime.kube.http_routes
        running = asyncio.ensure_future(run_kopf(runtime, namespaces))
        why = ""
        try:
            while not running.done() and not why:
                await asyncio.wait([running], timeout=CHECK_S)
                if runtime.kube.http_routes != had_routes:
                    why = "the API server has HTTPRoutes now"
                elif time.monotonic() > runtime.answered_at + SILENCE_S:
                    why = f"the watches got no answer for {SILENCE_S:g} s"
        finally:
            running.cancel()
            await asyncio.wait([running])
            error = None if running.cancelled() else running.exception()
            if isinstance(error, KopfHangsError):
                raise error
        why = why or f"kopf ended: {error!r}"
        log.warning("starting the watches again: %s", why)
        await asyncio.sleep(RESTART_S)


async def run_kopf(runtime: Runtime, namespaces: Collection[str]) -> None:
    """Run kopf in a thread until cancelled.

    The thread has an event loop of its own, because kopf ends all tasks of its loop and takes the
    signals of a main thread. A thread that hangs is left behind: it ends with the process.

    Raises:
        KopfHangsError
        Exception: what ended kopf.
    """
    loop, kopf_loop = asyncio.get_running_loop(), asyncio.new_event_loop()
    ended: asyncio.Future[None] = loop.create_future()
    stop = asyncio.Event()  # of kopf's loop: for a flag of another kind kopf keeps a thread, which waits without end

    def ignore_late_errors(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if not stop.is_set():  # when kopf stops, requests under way fail in tasks that nobody awaits
            kopf_loop.default_exception_handler(context)

    async def operate() -> None:
        ignored = asyncio.all_tasks()
        tasks = await kopf.spawn_tasks(
            memo=kopf.Memo(runtime=runtime), clusterwide=not namespaces, namespaces=namespaces, stop_flag=stop
        )
        running = asyncio.ensure_future(kopf.run_tasks(tasks, ignored=ignored))
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for _ in range(STOP_TRIES):  # a watch that is being opened swallows the first cancellation
            await asyncio.wait([running], timeout=STOP_TRY_S)
            if running.done():
                return running.result()
            for task in asyncio.all_tasks() - ignored - {running}:
                task.cancel()
        raise KopfHangsError("kopf did not stop when it was asked to, nor when its tasks were cancelled")

    async def report_end() -> None:
        error: BaseException | None = None
        try:
            await operate()
        except BaseException as raised:  # handed on
            error = raised
        loop.call_soon_threadsafe(end, error)  # here, because closing the loop may hang

    def run() -> None:
        kopf_loop.set_exception_handler(ignore_late_errors)
        with asyncio.Runner(loop_factory=lambda: kopf_loop) as runner:
            runner.run(report_end())

    def end(error: BaseException | None) -> None:
        stop.set()  # from here on its errors are late ones
        if error is None:
            ended.set_result(None)
        else:
            ended.set_exception(error)

    threading.Thread(target=run, name="kopf", daemon=True).start()
    try:
        await asyncio.shield(ended)
    finally:
        if not ended.done():
            with suppress(RuntimeError):  # the loop has just been closed
                kopf_loop.call_soon_threadsafe(stop.set)
            await asyncio.wait([ended], timeout=STOP_TIMEOUT_S)
        error = ended.exception() if ended.done() else KopfHangsError(f"kopf did not stop within {STOP_TIMEOUT_S:g} s")
        if isinstance(error, KopfHangsError):
            raise error
