"""kopf's event handlers, which queue a reconcile of the service to which a changed object belongs.

`baton-operator` runs the handlers while it holds the Lease. `kopf run -m baton_operator.handlers -n
NAMESPACE` runs them without a Lease.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import kopf

from baton_operator import names
from baton_operator.process import kopf_run, kopf_settings

LOGIN_INTERVAL_S = 2.0


@kopf.on.startup()
async def start(settings: kopf.OperatorSettings, memo: kopf.Memo, **_: Any) -> None:
    """Configure kopf. If `kopf run` started this process, also start the runtime."""
    kopf_settings.configure(settings)
    if "runtime" not in memo:  # under `kopf run`
        await kopf_run.start(memo)


@kopf.on.cleanup()
async def stop(memo: kopf.Memo, **_: Any) -> None:
    """Stop the runtime if `start` has started it, which is the case under `kopf run`."""
    await kopf_run.stop(memo)


@kopf.on.login()
async def login(memo: kopf.Memo, **_: Any) -> kopf.AiohttpSession:
    """Return a new HTTP session, with which kopf sends its requests.

    kopf calls this handler again after each 401 response. The handler delays its return, so that
    kopf gets at most one session per LOGIN_INTERVAL_S.
    """
    now = time.monotonic()
    await asyncio.sleep(max(0.0, memo.get("next_login", now) - now))
    memo.next_login = time.monotonic() + LOGIN_INTERVAL_S
    return kopf.AiohttpSession(
        server=memo.runtime.kube.client.server, aiohttp_session=memo.watch_session.open()
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
async def queue_reconcile(
    resource: kopf.Resource, meta: kopf.Meta, memo: kopf.Memo, **_: Any
) -> None:
    """Queue a reconcile of each service to which the changed object belongs."""
    kind = resource.kind or ""
    for key in names.keys_of(kind, meta):
        memo.runtime.queue_reconcile(key, kind, meta["resourceVersion"])
