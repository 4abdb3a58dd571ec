"""Run kopf, which watches the objects, in its own thread, and restart it when necessary."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Collection, Coroutine
from typing import Any

import kopf

from baton_operator.process import kopf_settings
from baton_operator.process.runtime import Runtime
from baton_operator.process.watch_session import WatchSession

logger = logging.getLogger("baton_operator")

#: The thread of kopf must stop within this time. Otherwise the process exits.
STOP_TIMEOUT_S = 20.0
#: The tasks of kopf are cancelled up to STOP_TRIES times, with STOP_TRY_S in between.
STOP_TRIES, STOP_TRY_S = 6, 2.0
CHECK_S = 2.0  # interval of the check whether kopf must be restarted
#: The server ends every watch after WATCH_S, and kopf opens the next one. kopf is restarted when
#: none of its watches gets a response for SILENCE_S.
SILENCE_S = 2 * kopf_settings.WATCH_S + 120.0
RESTART_S = 2.0  # pause before a restart of kopf


class KopfHangsError(Exception):
    """kopf did not stop in time. The process must exit, because a thread cannot be killed."""


class RestartError(Exception):
    """kopf still runs, but must be restarted."""


async def watch(runtime: Runtime, namespaces: Collection[str]) -> None:
    """Run kopf until cancelled, and restart it when necessary.

    A restart is necessary in three cases:

    - kopf has ended, for example because the CRD was deleted.
    - The watches get no response, for example because kopf cannot log in.
    - The API server serves HTTPRoutes now, which kopf discovers only at its start.

    Raises:
        KopfHangsError: kopf did not stop.
    """
    while True:
        await runtime.wait_for_crd()
        session = WatchSession(runtime)
        why = "kopf ended"
        try:
            await run_first_of(
                _wait_for_restart(runtime, session, runtime.kube.http_routes),
                run_kopf(runtime, session, namespaces),
            )
        except RestartError as error:
            why = str(error)
        except KopfHangsError:
            raise
        except Exception as error:
            why = f"kopf ended: {error!r}"
        logger.warning("the watches of kopf restart: %s", why)
        await asyncio.sleep(RESTART_S)


async def _wait_for_restart(runtime: Runtime, session: WatchSession, had_routes: bool) -> None:
    """Wait until kopf must be restarted.

    Args:
        had_routes: whether the API server served HTTPRoutes when kopf was started.

    Raises:
        RestartError: always, with the reason.
    """
    while runtime.kube.http_routes == had_routes:
        if time.monotonic() > session.answered_at + SILENCE_S:
            raise RestartError(f"the watches got no answer for {SILENCE_S:g} s")
        await asyncio.sleep(CHECK_S)
    raise RestartError("the API server now serves HTTPRoutes")


async def run_kopf(runtime: Runtime, session: WatchSession, namespaces: Collection[str]) -> None:
    """Run kopf in a thread until cancelled.

    The thread has its own event loop, because kopf cancels all tasks of its loop. In the main
    thread kopf would also replace the signal handlers. The thread is a daemon thread, so even a
    thread that hangs ends with the process.

    Raises:
        KopfHangsError: kopf did not stop.
        Exception: the error that ended kopf.
    """
    kopf_loop = asyncio.new_event_loop()
    # An asyncio.Event. For any other kind of stop flag, kopf starts a thread that never ends.
    stop = asyncio.Event()
    threading.Thread(target=_run_loop, args=[kopf_loop], name="kopf", daemon=True).start()
    ended = asyncio.wrap_future(
        asyncio.run_coroutine_threadsafe(_operate(runtime, session, namespaces, stop), kopf_loop)
    )
    try:
        await asyncio.shield(ended)
    finally:
        kopf_loop.call_soon_threadsafe(stop.set)
        await asyncio.wait([ended], timeout=STOP_TIMEOUT_S)
        # The loop is stopped after the wait, because closing it may hang.
        kopf_loop.call_soon_threadsafe(kopf_loop.stop)
        if not ended.done():
            raise KopfHangsError(f"the watches (kopf) did not stop within {STOP_TIMEOUT_S:g} s")
        if not ended.cancelled() and isinstance(error := ended.exception(), KopfHangsError):
            raise error


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Run the event loop until `loop.stop`, then close it as `asyncio.run` does."""
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.get_loop().run_forever()


async def _operate(
    runtime: Runtime, session: WatchSession, namespaces: Collection[str], stop: asyncio.Event
) -> None:
    """Run kopf in the running event loop until `stop` is set or kopf ends.

    Raises:
        KopfHangsError: kopf did not stop.
        Exception: the error that ended kopf.
    """

    def ignore_late_errors(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if not stop.is_set():  # when kopf stops, requests fail in tasks that are never awaited
            loop.default_exception_handler(context)

    asyncio.get_running_loop().set_exception_handler(ignore_late_errors)
    ignored = asyncio.all_tasks()
    try:
        memo = kopf.Memo(runtime=runtime, watch_session=session)
        tasks = await kopf.spawn_tasks(
            memo=memo, clusterwide=not namespaces, namespaces=namespaces, stop_flag=stop
        )
        running = asyncio.ensure_future(kopf.run_tasks(tasks, ignored=ignored))
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for _ in range(STOP_TRIES):  # a watch that is being opened swallows the first cancellation
            await asyncio.wait([running], timeout=STOP_TRY_S)
            if running.done():
                return running.result()
            for task in asyncio.all_tasks() - ignored - {running}:
                task.cancel()
        raise KopfHangsError("the watches (kopf) did not stop, even after they were cancelled")
    finally:
        stop.set()  # later errors are ignored


async def run_first_of(*work: Coroutine[Any, Any, object]) -> None:
    """Run the coroutines concurrently until one of them ends, then cancel the others.

    The other coroutines are cancelled one by one, in the order of `work`.

    Raises:
        KopfHangsError: kopf did not stop. This error takes priority over other errors and over a
            cancellation.
        Exception: the error of the first coroutine in `work` that failed.
    """
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
            await asyncio.wait([task])
        errors = [error for task in tasks if not task.cancelled() and (error := task.exception())]
        for error in errors:
            if isinstance(error, KopfHangsError):
                raise error
    for error in errors:
        raise error
