"""End a process on SIGTERM, or when its parent process ends."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
#: Loaded before any fork: between fork and exec, a child can only call loaded functions.
_libc = ctypes.CDLL(None, use_errno=True)


def set_parent_death_signal(signum: int) -> None:
    """Ask the kernel to send `signum` to this process when the thread that forked it ends.

    Safe between fork and exec. Linux only.
    """
    if _libc.prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")


def kill_at_end_of_parent() -> Callable[[], None]:
    """Return a `preexec_fn` that asks the kernel to SIGKILL the child when its parent ends."""
    parent = os.getpid()

    def before_exec() -> None:
        set_parent_death_signal(signal.SIGKILL)
        if os.getppid() != parent:  # the parent ended before prctl
            os._exit(1)

    return before_exec


def die_with_parent() -> None:
    """Ask the kernel to send SIGTERM to this process when its parent ends."""
    parent = os.getppid()
    set_parent_death_signal(signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit(f"the parent process {parent} has ended, so this process ends")


def run_until_terminated(
    main: Callable[[asyncio.Event], Awaitable[None]], *, name: str, stop_timeout_s: float
) -> None:
    """Configure logging and run `main(stop)` until it returns. SIGTERM and SIGINT set `stop`.

    If `main` has not returned `stop_timeout_s` after SIGTERM or SIGINT, SIGALRM ends the process.
    """
    logging.basicConfig(
        level=logging.INFO, format=f"%(asctime)s %(levelname).1s {name} %(name)s: %(message)s"
    )

    async def supervised() -> None:
        stop = asyncio.Event()

        def terminate() -> None:
            signal.setitimer(signal.ITIMER_REAL, stop_timeout_s)
            stop.set()

        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, terminate)
        await main(stop)

    asyncio.run(supervised())


async def wait_up_to(timeout_s: float, event: asyncio.Event) -> bool:
    """Wait for `event`. Return whether it was set within `timeout_s`."""
    try:
        async with asyncio.timeout(timeout_s):
            return await event.wait()
    except TimeoutError:
        return False


async def until_stopped(stop: asyncio.Event, *loops: Awaitable[None]) -> None:
    """Run all `loops` concurrently until `stop` is set or a loop ends.

    Then cancel the loops that still run. If a loop has failed, raise its error.
    """
    tasks = [asyncio.ensure_future(loop) for loop in loops]
    waiter = asyncio.ensure_future(stop.wait())
    try:
        done, _ = await asyncio.wait([waiter, *tasks], return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in (waiter, *tasks):
            task.cancel()
        await asyncio.gather(waiter, *tasks, return_exceptions=True)
