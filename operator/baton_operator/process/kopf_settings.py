"""Settings of kopf that turn off everything but its watches."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import kopf

from baton_operator import names
from baton_operator.kube.objects import PAGE_SIZE

REQUEST_TIMEOUT_S = 30.0
#: Seconds after which the server ends a watch. kopf then opens the next watch at the last resource
#: version, so a working watch gets a response at least this often.
WATCH_S = 240
#: A watch without any data for this long is opened again. API servers send a bookmark every 60 s.
INACTIVITY_S = 70.0
STOP_S = 30.0
LAST_BACKOFF_S = 10.0
#: API servers refuse this name, so no object has this finalizer. kopf would try
#: to remove it from an object again and again, because the operator has no right to change
#: LLMServices.
FINALIZER = "never set"
OURS = f"{names.LABEL_MANAGED_BY}={names.MANAGER}"


class NoDiffBase(kopf.DiffBaseStorage):
    """Replaces kopf's storage of the last handled version of each object, and stores nothing.

    kopf's default storage would copy every object that a watch shows.
    """

    def build(self, **_: Any) -> Any:
        return {}

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        raise AssertionError("event handlers store nothing")


class Backoffs:
    """Seconds between retries of kopf's requests, as an infinite sequence.

    After a finite sequence kopf would give up and exit.
    """

    def __iter__(self) -> Iterator[float]:
        return itertools.chain([0.5, 1.0, 2.0, 4.0, 8.0], itertools.repeat(LAST_BACKOFF_S))


def configure(settings: kopf.OperatorSettings) -> None:
    """Turn off kopf's peering, Events, finalizers and annotations, and set the watch timeouts."""
    settings.peering.standalone = True
    settings.posting.enabled = False
    settings.scanning.disabled = True  # scanning needs the right to watch CRDs and namespaces
    settings.persistence.finalizer = FINALIZER
    settings.persistence.diffbase_storage = NoDiffBase()
    settings.process.ultimate_exiting_timeout = STOP_S
    settings.networking.request_timeout = REQUEST_TIMEOUT_S
    settings.networking.error_backoffs = Backoffs()
    # how long the worker of an object waits for its next event
    settings.queueing.idle_timeout = 0.1
    settings.watching.chunk_size = PAGE_SIZE
    settings.watching.connect_timeout = REQUEST_TIMEOUT_S
    settings.watching.inactivity_timeout = INACTIVITY_S
    settings.watching.server_timeout = WATCH_S
    settings.watching.label_selectors[lambda resource: resource.kind != names.KIND] = OURS
