"""kopf's handlers. They only make services due; `reconcile.py` does the work.

`baton-operator` runs them while it holds a Lease. `kopf run -m baton_operator.handlers -n
NAMESPACE` runs them without one.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any

import kopf
from kubernetes.aio.config import ConfigException

from baton_operator import names
from baton_operator.runtime import open_runtime

logger = logging.getLogger(__name__)

REQUEST_TIMEOUT_S = 30.0
#: Seconds after which the server ends a watch. kopf then resumes it from the last resource version.
#: So a working watch gets an answer at least this often.
WATCH_S = 240
INACTIVITY_S = 70.0  # API servers send a bookmark every minute
LOGIN_INTERVAL_S = 2.0
STOP_S = 30.0
LAST_BACKOFF_S = 10.0
OURS = f"{names.LABEL_MANAGED_BY}={names.MANAGER}"


@kopf.on.startup()
async def start(settings: kopf.OperatorSettings, memo: kopf.Memo, **_: Any) -> None:
    """Configure kopf. Under `kopf run`, also start the runtime."""
    configure(settings)
    if "runtime" not in memo:  # under `kopf run`
        logger.warning("kopf run takes no Lease: stop every other operator of these LLMServices")
        logging.getLogger("kopf.objects").setLevel(logging.WARNING)  # it logs every event
        memo.stack = AsyncExitStack()
        in_cluster = "KUBERNETES_SERVICE_HOST" in os.environ
        kubeconfig = os.environ.get("KUBECONFIG") or (None if in_cluster else "~/.kube/config")
        try:
            memo.runtime = await memo.stack.enter_async_context(open_runtime(kubeconfig))
        except ConfigException as error:
            raise kopf.PermanentError(str(error)) from error
        await memo.runtime.wait_for_crd()
        memo.running = asyncio.create_task(memo.runtime.run())


@kopf.on.cleanup()
async def stop(memo: kopf.Memo, **_: Any) -> None:
    """Under `kopf run`, stop the runtime."""
    if "running" in memo:
        memo.running.cancel()
        await asyncio.gather(memo.running, return_exceptions=True)
        await memo.stack.aclose()


@kopf.on.login()
async def login(memo: kopf.Memo, **_: Any) -> kopf.AiohttpSession:
    """Return the session of the watches.

    kopf logs in again after each 401. This function limits it to once per LOGIN_INTERVAL_S.
    """
    now = time.monotonic()
    await asyncio.sleep(max(0.0, memo.get("next_login", now) - now))
    memo.next_login = time.monotonic() + LOGIN_INTERVAL_S
    return kopf.AiohttpSession(
        server=memo.runtime.kube.client.server, aiohttp_session=memo.runtime.watch_session()
    )


@kopf.on.event(names.API_VERSION, names.PLURAL)
@kopf.on.event("v1", "pods")
@kopf.on.event("v1", "services")
@kopf.on.event("v1", "configmaps")
@kopf.on.event("v1", "serviceaccounts")
@kopf.on.event("apps/v1", "deployments")
@kopf.on.event("networking.k8s.io/v1", "ingresses")
@kopf.on.event("networking.k8s.io/v1", "networkpolicies")
@kopf.on.event("rbac.authorization.k8s.io/v1", "roles")
@kopf.on.event("rbac.authorization.k8s.io/v1", "rolebindings")
@kopf.on.event("policy", "poddisruptionbudgets")
@kopf.on.event("gateway.networking.k8s.io/v1", "httproutes")
async def changed(resource: kopf.Resource, meta: kopf.Meta, memo: kopf.Memo, **_: Any) -> None:
    """Make the services due that the changed object belongs to."""
    kind = resource.kind or ""
    for key in keys_of(kind, meta):
        memo.runtime.changed(key, kind, meta["resourceVersion"])


def keys_of(kind: str, meta: kopf.Meta) -> Iterator[names.Key]:
    """Yield the services that an object belongs to, by its label and by its owner references.

    A user may have changed the label.
    """
    namespace = meta["namespace"]
    if kind == names.KIND:
        yield names.Key(namespace, meta["name"])
        return
    owners = {
        each["name"]
        for each in meta.get("ownerReferences") or ()
        if each.get("controller")
        and (each["apiVersion"], each["kind"]) == (names.API_VERSION, names.KIND)
    }
    found = owners | {meta.labels.get(names.LABEL_SERVICE, "")}
    yield from (names.Key(namespace, name) for name in found if names.SERVICE_NAME.fullmatch(name))


class NoDiffBase(kopf.DiffBaseStorage):
    """A storage that keeps no state in objects.

    kopf's default storage copies every object to compute its state.
    """

    def build(self, **_: Any) -> Any:
        return {}

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        raise AssertionError("event handlers store nothing")


class Backoffs:
    """Seconds between retries of kopf's requests.

    The sequence is infinite: after the last retry kopf would end.
    """

    def __iter__(self) -> Iterator[float]:
        return itertools.chain([0.5, 1.0, 2.0, 4.0, 8.0], itertools.repeat(LAST_BACKOFF_S))


def configure(settings: kopf.OperatorSettings) -> None:
    """Turn off everything but the watches: peering, Events, finalizers and annotations."""
    settings.peering.standalone = True
    settings.posting.enabled = False
    settings.scanning.disabled = True  # scanning needs the right to watch CRDs and namespaces
    settings.persistence.finalizer = f"{names.GROUP}/never-set"
    settings.persistence.diffbase_storage = NoDiffBase()
    settings.process.ultimate_exiting_timeout = STOP_S
    settings.networking.request_timeout = REQUEST_TIMEOUT_S
    settings.networking.error_backoffs = Backoffs()
    # how long the worker of an object waits for its next event
    settings.queueing.idle_timeout = 0.1
    settings.watching.chunk_size = 500
    settings.watching.connect_timeout = REQUEST_TIMEOUT_S
    settings.watching.inactivity_timeout = INACTIVITY_S
    settings.watching.server_timeout = WATCH_S
    settings.watching.label_selectors[lambda resource: resource.kind != names.KIND] = OURS
