"""Serve watches: streams of changes after a resource version, as JSON lines."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import msgspec
from aiohttp import web

from pocketkube.apiserver import errors
from pocketkube.apiserver.cluster_state import ClusterState
from pocketkube.apiserver.resources import Object, Resource
from pocketkube.apiserver.serving.request_parsing import is_set
from pocketkube.apiserver.serving.selectors import Predicate
from pocketkube.apiserver.serving.tables import TablePrinter
from pocketkube.apiserver.store import ExpiredError, StoreEvent

#: Interval between bookmarks in an idle watch.
BOOKMARK_S = 20.0
_DEFAULT_TIMEOUT_S = 1800.0  # duration of a watch without `timeoutSeconds`


@dataclass(frozen=True)
class Selection:
    """The objects that a client watches, and their output format."""

    resource: Resource
    #: Empty: all namespaces.
    namespace: str
    #: The selectors of the watch.
    matches: Predicate
    #: Formats the objects as tables. None: the client requested no tables.
    printer: TablePrinter | None
    #: What a table row has in addition to its cells: "None", "Metadata" or "Object".
    include: str


class _Stream:
    """Formats and sends the events of one watch. Tables have headers only in the first event."""

    def __init__(
        self, response: web.StreamResponse, cluster: ClusterState, chosen: Selection
    ) -> None:
        self._response = response
        self._registry = cluster.registry
        self._chosen = chosen
        self._headers = True

    async def send(self, kind: str, obj: Object) -> None:
        await self._response.write(msgspec.json.encode({"type": kind, "object": obj}) + b"\n")

    async def event(self, kind: str, obj: Object) -> None:
        chosen = self._chosen
        shown = self._registry.view(chosen.resource, obj)
        if chosen.printer:
            version = {"resourceVersion": obj["metadata"]["resourceVersion"]}
            shown = chosen.printer.table([shown], version, chosen.include, headers=self._headers)
            self._headers = False
        await self.send(kind, shown)

    async def bookmark(self, version: int, initial_end: bool = False) -> None:
        metadata: Object = {"resourceVersion": str(version), "creationTimestamp": None}
        if initial_end:
            metadata["annotations"] = {"k8s.io/initial-events-end": "true"}
        resource = self._chosen.resource
        obj: Object = {
            "kind": resource.kind,
            "apiVersion": resource.api_version,
            "metadata": metadata,
        }
        if self._chosen.printer:
            table = self._chosen.printer.table([], metadata, "None", headers=False)
            obj = {**table, "rows": [{"cells": [], "object": obj}]}
        await self.send("BOOKMARK", obj)


async def watch(
    request: web.Request, cluster: ClusterState, chosen: Selection
) -> web.StreamResponse:
    """Serve a watch, and return its response.

    The watch ends after the request's `timeoutSeconds`. It ends earlier if the client disconnects
    or reads too slowly, or if the server stops serving the watched kind.
    """
    query = request.query
    since = query.get("resourceVersion", "")
    bookmarks, initial = is_set(query, "allowWatchBookmarks"), is_set(query, "sendInitialEvents")
    if initial and not (bookmarks and query.get("resourceVersionMatch") == "NotOlderThan"):
        raise errors.bad_request(
            "sendInitialEvents needs allowWatchBookmarks=true and resourceVersionMatch=NotOlderThan"
        )
    try:
        timeout_s = float(query.get("timeoutSeconds") or _DEFAULT_TIMEOUT_S)
        version = int(since) if since not in ("", "0") and not initial else None
    except ValueError as error:
        raise errors.bad_request(
            f"resourceVersion {since!r} and timeoutSeconds must be numbers"
        ) from error

    response = web.StreamResponse(
        headers={"Content-Type": "application/json", "Cache-Control": "no-cache, private"}
    )
    store, storage = cluster.store, chosen.resource.storage_key
    stream = _Stream(response, cluster, chosen)
    try:
        queue = store.subscribe(storage, version)
    except ExpiredError as error:
        await response.prepare(request)
        await stream.send("ERROR", errors.expired(str(error)).status())
        await response.write_eof()
        return response
    try:
        # No await separates this list from subscribe() above, so no event between them is lost.
        present = store.list(storage, chosen.namespace) if version is None else []
        start = store.version
        await response.prepare(request)
        for obj in present:
            if chosen.matches(obj):
                await stream.event("ADDED", obj)
        if initial:
            await stream.bookmark(start, initial_end=True)
        await _follow(stream, queue, cluster, chosen, bookmarks, timeout_s)
        await response.write_eof()
    except ConnectionError:
        pass  # the client has disconnected
    finally:
        store.unsubscribe(storage, queue)
    return response


async def _follow(
    stream: _Stream,
    queue: asyncio.Queue[StoreEvent | None],
    cluster: ClusterState,
    chosen: Selection,
    bookmarks: bool,
    timeout_s: float,
) -> None:
    deadline = time.monotonic() + timeout_s
    next_bookmark = time.monotonic() + BOOKMARK_S
    while (left := deadline - time.monotonic()) > 0:
        wait_s = min(left, max(next_bookmark - time.monotonic(), 0.01)) if bookmarks else left
        try:
            async with asyncio.timeout(wait_s):
                event = await queue.get()
        except TimeoutError:
            if bookmarks and queue.empty():
                await stream.bookmark(cluster.store.version)
                next_bookmark = time.monotonic() + BOOKMARK_S
            continue
        if event is None:
            return
        if seen := _seen_as(event, chosen):
            await stream.event(*seen)


def _seen_as(event: StoreEvent, chosen: Selection) -> tuple[str, Object] | None:
    """Return the (type, object) that the watch sends for `event`; None to send nothing.

    In a watch with a selector, an object that starts to match is ADDED, and an object that stops
    matching is DELETED. The DELETED event then contains the last state that matched, with the
    resource version of the change.
    """
    if chosen.namespace and event.namespace != chosen.namespace:
        return None
    previous = (
        event.previous if event.previous is not None and chosen.matches(event.previous) else None
    )
    if event.type == "DELETED":
        return ("DELETED", event.object) if previous else None
    if chosen.matches(event.object):
        return ("MODIFIED" if previous else "ADDED"), event.object
    if previous is None:
        return None
    version = event.object["metadata"]["resourceVersion"]
    return "DELETED", {**previous, "metadata": {**previous["metadata"], "resourceVersion": version}}
