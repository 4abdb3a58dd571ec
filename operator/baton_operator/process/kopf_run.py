"""The runtime of a process that `kopf run` started: without a Lease, for one cluster."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import kopf
from kubernetes.aio.config import ConfigException

from baton_operator.builders.restrictions import Restrictions
from baton_operator.process.runtime import Runtime, open_runtime
from baton_operator.process.watch_session import WatchSession

logger = logging.getLogger(__name__)


async def start(memo: kopf.Memo) -> None:
    """Start a runtime, and store it in `memo`.

    Raises:
        kopf.PermanentError: no cluster is configured.
    """
    logger.warning("kopf run takes no Lease: stop every other operator of these LLMServices")
    logging.getLogger("kopf.objects").setLevel(logging.WARNING)  # it logs every event
    memo.stack = AsyncExitStack()
    try:
        memo.runtime = await memo.stack.enter_async_context(_start_runtime())
    except ConfigException as error:
        raise kopf.PermanentError(str(error)) from error
    memo.watch_session = WatchSession(memo.runtime)


async def stop(memo: kopf.Memo) -> None:
    """Stop the runtime, if `start` has started it."""
    if "stack" in memo:
        await memo.stack.aclose()


@asynccontextmanager
async def _start_runtime() -> AsyncIterator[Runtime]:
    """Start a runtime, and stop it when the context is left.

    The runtime connects to the cluster of $KUBECONFIG. Without this variable, it connects to the
    pod's cluster or, outside of a pod, to the cluster of `~/.kube/config`. The templates of
    LLMServices are restricted, without exceptions.

    Raises:
        ConfigException: no cluster is configured.
    """
    in_cluster = "KUBERNETES_SERVICE_HOST" in os.environ
    kubeconfig = os.environ.get("KUBECONFIG") or (None if in_cluster else "~/.kube/config")
    async with open_runtime(kubeconfig, Restrictions()) as runtime:
        await runtime.wait_for_crd()
        running = asyncio.create_task(runtime.run())
        try:
            yield runtime
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
