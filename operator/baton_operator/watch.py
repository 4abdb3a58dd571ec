"""Watches, by kopf: every event about a service, or about what belongs to one, makes the service's key due. Nothing else.

Only `on.event` handlers are registered, so kopf writes nothing into any object: no finalizer, no annotation, no Event.
It has a thread and an event loop of its own: when it ends, it also ends whatever tasks it finds on its loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Collection, Coroutine
from typing import Any

import kopf
from kubernetes.aio import client

from baton_operator import names
from baton_operator.workqueue import Key

log = logging.getLogger(__name__)

RESTART_S = 2.0
END_TIMEOUT_S = 10.0

_OWNED = (
    ("", "v1", "pods"),
    ("", "v1", "services"),
    ("", "v1", "configmaps"),
    ("apps", "v1", "deployments"),
    ("networking.k8s.io", "v1", "ingresses"),
)


async def watch(
    add: Callable[[Key], None],
    *,
    configuration: client.Configuration,
    in_cluster: bool,
    namespaces: Collection[str],
    stop: asyncio.Event,
) -> None:
    """Runs until `stop` is set; `add` is called on this event loop.

    An answer that kopf takes for the end (an error inside a watch, a 401, a CRD that is gone for a while) only means that
    everything is listed anew.

    Args:
        configuration: of the API server, as `kube.connect` loaded it.
        in_cluster: whether credentials are the pod's own; they are read anew when they expire.
        namespaces: empty for all.
    """
    loop = asyncio.get_running_loop()

    def due(key: Key) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(add, key)

    stopped = asyncio.ensure_future(stop.wait())
    while not stop.is_set():
        kopf_thread = _KopfThread(due, configuration=configuration, in_cluster=in_cluster, namespaces=namespaces)
        waits: list[asyncio.Future[Any]] = [stopped, kopf_thread.over]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            kopf_thread.end()
        if not stop.is_set():
            why = kopf_thread.over.result()
            log.warning("the watches ended, starting them again in %g s: %s", RESTART_S, why)
        # Its thread takes seconds to end; nobody waits for it, for its late events are harmless.
        await asyncio.wait([stopped], timeout=RESTART_S)
    await stopped


class _KopfThread:
    """One run of kopf. It is over when kopf ended, or asks for credentials again: with the same ones it would wait for ever."""

    def __init__(
        self,
        due: Callable[[Key], None],
        *,
        configuration: client.Configuration,
        in_cluster: bool,
        namespaces: Collection[str],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.over: asyncio.Future[str] = self._loop.create_future()
        """Why."""
        self._end = threading.Event()
        self._logins = 0

        def login(**kwargs: Any) -> kopf.ConnectionInfo | None:
            self._logins += 1
            if self._logins > 1:
                self._tell("the API server refused the credentials")
            return kopf.login_with_service_account(**kwargs) if in_cluster else _connection_info(configuration)

        self._own_loop = asyncio.new_event_loop()
        operator = _operator(due, login=login, namespaces=namespaces, end=self._end)
        # A daemon: nothing in it needs to be finished, and a process that ends must not wait for it.
        threading.Thread(target=self._run, args=[operator], name="kopf", daemon=True).start()

    def end(self) -> None:
        """Asks kopf to end; what has not ended after END_TIMEOUT_S is stopped, so that threads do not pile up."""
        self._end.set()
        self._loop.call_later(END_TIMEOUT_S, self._stop_loop)

    def _stop_loop(self) -> None:
        with contextlib.suppress(RuntimeError):  # it has ended
            self._own_loop.call_soon_threadsafe(self._own_loop.stop)

    def _run(self, operator: Coroutine[Any, Any, None]) -> None:
        why = "kopf ended"
        loop = self._own_loop
        asyncio.set_event_loop(loop)
        try:
            loop.run_until_complete(operator)
        except Exception as error:  # whatever it was: without watches every change waits for the resync
            why = str(error) or type(error).__name__
        self._tell(why)
        if pending := asyncio.all_tasks(loop):
            for task in pending:
                task.cancel()
            loop.run_until_complete(asyncio.wait(pending, timeout=1.0))
        loop.close()

    def _tell(self, why: str) -> None:
        def tell() -> None:
            if not self.over.done():
                self.over.set_result(why)

        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            self._loop.call_soon_threadsafe(tell)


async def _operator(
    due: Callable[[Key], None],
    *,
    login: Callable[..., kopf.ConnectionInfo | None],
    namespaces: Collection[str],
    end: threading.Event,
) -> None:
    """kopf until `end` is set. Raises whatever ends it before."""
    registry = kopf.OperatorRegistry()

    def on_service(namespace: str, name: str, **_: Any) -> None:
        due(Key(namespace, name))

    def on_owned(namespace: str, labels: dict[str, str], **_: Any) -> None:
        if service := labels.get(names.LABEL_SERVICE):
            due(Key(namespace, service))

    kopf.on.login(registry=registry, id="login")(login)
    kopf.on.event(names.GROUP, names.VERSION, names.PLURAL, registry=registry, id="service")(on_service)
    settings = kopf.OperatorSettings()
    for group, version, plural in _OWNED:
        kopf.on.event(group, version, plural, registry=registry, id=f"owned-{plural}")(on_owned)
        settings.watching.label_selectors[group, version, plural] = f"{names.LABEL_MANAGED_BY}={names.MANAGER}"
    settings.posting.enabled = False
    settings.peering.standalone = True
    settings.scanning.disabled = (
        True  # the CRD is there before this starts; no right to watch CRDs or namespaces is needed
    )
    settings.watching.server_timeout = 300
    settings.watching.connect_timeout = 10
    settings.persistence.finalizer = f"{names.GROUP}/finalizer"  # never written; should that change, it is our own
    # What ends it is raised here; its dead tasks would say it a second time, whenever they are collected.
    asyncio.get_running_loop().set_exception_handler(lambda _, context: log.debug("kopf: %s", context["message"]))
    try:
        await kopf.operator(
            registry=registry,
            settings=settings,
            clusterwide=not namespaces,
            namespaces=list(namespaces),
            stop_flag=end,
            identity="baton-operator",  # else kopf asks for the user's name, which not every user id has
        )
    finally:
        end.set()  # a thread of kopf waits for it


def _connection_info(configuration: client.Configuration) -> kopf.ConnectionInfo:
    """kopf's form of the same credentials."""
    scheme, _, token = configuration.api_key.get("BearerToken", "").partition(" ")
    return kopf.ConnectionInfo(
        server=configuration.host,
        ca_path=configuration.ssl_ca_cert,
        insecure=not configuration.verify_ssl,
        username=configuration.username or None,
        password=configuration.password or None,
        scheme=scheme if token else None,
        token=token or scheme or None,
        certificate_path=configuration.cert_file,
        private_key_path=configuration.key_file,
    )
