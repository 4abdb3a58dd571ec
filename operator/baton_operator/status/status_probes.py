"""Request the state that no watched object contains.

Pods report loading progress, KV compatibility, and whether they are paused or asleep. The API
server shows which Secrets and ConfigMaps do not exist although pods wait for them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from datetime import datetime, timedelta

import aiohttp
import msgspec

from baton_kube.client import KubeError, Object, read_body
from baton_operator import names
from baton_operator.builders.member_pods import CONTAINER
from baton_operator.builders.resolved_service import ResolvedService
from baton_operator.kube.objects import Kube
from baton_operator.observe.observation import (
    Observation,
    Reference,
    is_ready,
    member,
    unready_since,
)
from baton_operator.status.diagnose import is_leaving, sorted_by_name
from baton_operator.status.missing_references import may_lack_objects, references
from baton_operator.status.reasons import Progress
from baton_operator.status.suspended_engines import SUSPENSIONS
from baton_protocol.kv_compatibility import KVCompatibility
from baton_protocol.options.config import ENGINE_HTTP_PORT
from baton_protocol.process.health import Health

#: Timeout of one request to a pod. It is short, because the reconcile waits for the reply.
TIMEOUT_S = 1.0
#: Longest wait of a reconcile for the replies of all pods to one kind of request. It includes the
#: wait for one of the CONCURRENCY slots.
DEADLINE_S = 3.0
#: Concurrent requests to pods, over all services.
CONCURRENCY = 64
#: Limit on a reply. All replies of a service's pods are kept until the end of the reconcile.
MAX_REPLY_BYTES = 2**14
#: Maximum number of pods that one reconcile probes for loading progress. The same maximum applies
#: to the Secrets and ConfigMaps that it requests. A condition names only a few of them.
MAX_PROBED = 16


class StatusProbes:
    """Sends `GET /health` and `GET /ready` to prefill and decode pods (members).

    An instance stores the times at which members were paused or asleep, and the KV compatibility of
    members. KV compatibility is the set of values, such as the block size, that must be equal in
    two engines that exchange KV blocks.

    Args:
        session: HTTP session for requests to pods. None: no such request is sent.
    """

    def __init__(self, session: aiohttp.ClientSession | None, port: int = ENGINE_HTTP_PORT) -> None:
        self._session = session
        self._port = port
        self._slots = asyncio.Semaphore(CONCURRENCY)
        #: KV compatibility by engine process, from `_process`. The compatibility of a process never
        #: changes, so each process gets one request. None: the engine has no KV role.
        self._known: dict[names.Key, dict[str, KVCompatibility | None]] = {}
        #: `Observation.suspended_at` of the last reconcile, for pods that do not answer. After a
        #: restart of the operator, the replies of engines restore the times.
        self._suspended_at: dict[names.Key, dict[str, datetime]] = {}

    async def find_suspended(self, observed: Observation, now: datetime) -> Observation:
        """Find the members that are paused or asleep. Return a copy of `observed` with the results.

        The progress deadline of a member starts no earlier than its last pause or sleep.
        """
        replies = await self.readiness(observed.pods)
        suspended = {name: reply for name, reply in replies.items() if reply.reason in SUSPENSIONS}
        resumed = {
            name: now - timedelta(seconds=reply.resumed_s)
            for name, reply in replies.items()
            if reply.resumed_s is not None
        }
        last = self._suspended_at.get(observed.key, {}) | resumed | dict.fromkeys(suspended, now)
        unready = {pod["metadata"]["name"]: pod for pod in observed.pods if not is_ready(pod)}
        suspended_at = {name: at for name, at in last.items() if name in unready}
        self._suspended_at[observed.key] = suspended_at
        since = {name: unready_since(unready[name], last) for name in suspended_at}
        members = {
            role: [
                msgspec.structs.replace(
                    each, unready_since=since.get(each.name, each.unready_since)
                )
                for each in members
            ]
            for role, members in observed.members.items()
        }
        return msgspec.structs.replace(
            observed, suspended=suspended, suspended_at=suspended_at, members=members
        )

    async def probe(
        self, kube: Kube, observed: Observation, resolved: ResolvedService
    ) -> Observation:
        """Probe the pods. Return `observed` with the results in `loading`, `missing` and `kv`."""
        loading = await self.loading(observed.pods)
        # Objects that the operator creates are not requested.
        known = {
            Reference("ConfigMap", name) for kind, name in observed.objects if kind == "ConfigMap"
        }
        known.add(Reference("Secret", names.service_key_name(resolved.name)))
        unready = [pod for pod in observed.pods if not is_ready(pod)]
        missing = await find_missing(kube, resolved.namespace, unready, known)
        kv: Mapping[str, KVCompatibility] = {}
        if resolved.replicas("prefill"):
            kv = await self.kv(observed.key, observed.pods)
        else:
            self._known.pop(observed.key, None)
        return msgspec.structs.replace(observed, loading=loading, missing=missing, kv=kv)

    def forget(self, key: names.Key) -> None:
        """Drop the stored times and KV compatibility of the members of a deleted service."""
        self._known.pop(key, None)
        self._suspended_at.pop(key, None)

    async def loading(self, pods: list[Object]) -> dict[str, Health]:
        """Return the `GET /health` replies of members that fetch or load the model, by pod name."""
        probed = sorted_by_name(filter(_is_unready_member, pods))[:MAX_PROBED]
        replies = await self._replies(probed, "/health")
        reasons = (Progress.FETCHING, Progress.LOADING)
        return {name: reply for name, reply in replies.items() if reply.reason in reasons}

    async def readiness(self, pods: list[Object]) -> dict[str, Health]:
        """Return the replies to `GET /ready` of started members that are not ready, by pod name.

        All these members are probed, because the planner needs every reply.
        """
        started = [pod for pod in pods if _is_unready_member(pod) and member(pod).started]
        return await self._replies(started, "/ready")

    async def _replies(self, pods: list[Object], path: str) -> dict[str, Health]:
        """Return the replies of `pods` to `GET <path>`, by pod name."""
        replies = await asyncio.gather(*(self._get(pod, path) for pod in pods))
        return {
            pod["metadata"]["name"]: reply
            for pod, reply in zip(pods, replies, strict=True)
            if reply is not None
        }

    async def kv(self, key: names.Key, pods: list[Object]) -> dict[str, KVCompatibility]:
        """Return the KV compatibility of ready members that have a KV role, by pod name."""
        probed = {_process(pod): pod for pod in pods if _is_member(pod) and is_ready(pod)}
        known = {
            process: kv for process, kv in self._known.get(key, {}).items() if process in probed
        }
        new = [process for process in probed if process not in known]
        replies = await asyncio.gather(*(self._get(probed[process], "/health") for process in new))
        known |= {
            process: health.kv
            for process, health in zip(new, replies, strict=True)
            if health is not None
        }
        self._known[key] = known
        return {
            probed[process]["metadata"]["name"]: kv
            for process, kv in known.items()
            if kv is not None
        }

    async def _get(self, pod: Object, path: str) -> Health | None:
        """Return the pod's reply to a GET request; None without a valid reply by the deadline."""
        host = (pod.get("status") or {}).get("podIP")
        if self._session is None or not host:
            return None
        url = f"http://{names.url_host(host)}:{self._port}{path}"
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        try:
            async with (
                asyncio.timeout(DEADLINE_S),
                self._slots,
                self._session.get(url, timeout=timeout, allow_redirects=False) as response,
            ):
                body = await read_body(response, MAX_REPLY_BYTES)
                health = msgspec.json.decode(body, type=Health)
                return msgspec.structs.replace(health, kv_bytes={})  # not used here, and large
        except (aiohttp.ClientError, OSError, ValueError, RecursionError):
            return None


def is_progress_expected(pods: list[Object], loading: Mapping[str, Health]) -> bool:
    """Return whether the next probe may show that the loading of a model has advanced.

    True if a pod reports progress now, or if a starting pod has not reported progress yet.
    """
    return bool(loading) or any(_is_unready_member(pod) and _is_starting(pod) for pod in pods)


async def find_missing(
    kube: Kube, namespace: str, pods: list[Object], known: Collection[Reference]
) -> frozenset[Reference]:
    """Return the Secrets and ConfigMaps that do not exist although `pods` wait for them.

    Only metadata is requested, never the contents of a Secret. At most MAX_PROBED objects are
    checked.

    Args:
        known: objects that are not requested, because the operator creates them.
    """
    wanted = {reference for pod in pods if may_lack_objects(pod) for reference in references(pod)}
    probed = sorted(wanted - set(known))[:MAX_PROBED]
    exists = await asyncio.gather(*(_exists(kube, namespace, reference) for reference in probed))
    return frozenset(
        reference for reference, there in zip(probed, exists, strict=True) if not there
    )


async def _exists(kube: Kube, namespace: str, reference: Reference) -> bool:
    """Return whether the object exists.

    True also if the request fails, so that an existing object is never reported as missing.
    """
    try:
        return await kube.exists(reference.kind, namespace, reference.name)
    except (KubeError, OSError):
        return True


def _is_member(pod: Object) -> bool:
    return pod["metadata"]["labels"].get(names.LABEL_ROLE) in names.MEMBER_ROLES


def _is_unready_member(pod: Object) -> bool:
    has_address = bool((pod.get("status") or {}).get("podIP"))
    return _is_member(pod) and has_address and not is_ready(pod) and not is_leaving(pod)


def _is_starting(pod: Object) -> bool:
    """Return whether the pod is starting.

    True: an init container runs, or the engine runs and has not passed its startup probe.
    """
    status = pod.get("status") or {}
    engines = [each for each in status.get("containerStatuses") or [] if not each.get("started")]
    containers = [*(status.get("initContainerStatuses") or []), *engines]
    return any((each.get("state") or {}).get("running") is not None for each in containers)


def _process(pod: Object) -> str:
    """Return an id of the pod's engine process, which changes at every restart."""
    containers = (pod.get("status") or {}).get("containerStatuses") or []
    engine: Object = next((each for each in containers if each["name"] == CONTAINER), {})
    started = ((engine.get("state") or {}).get("running") or {}).get("startedAt", "")
    return f"{pod['metadata'].get('uid', '')} {engine.get('restartCount', 0)} {started}"
