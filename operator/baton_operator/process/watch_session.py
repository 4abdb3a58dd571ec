"""The HTTP session in which kopf sends its requests, with a record of the responses."""

from __future__ import annotations

import time

import aiohttp

from baton_kube.client import METADATA
from baton_operator.kube.objects import PLURALS
from baton_operator.process.runtime import Runtime


class WatchSession:
    """Opens HTTP sessions for kopf's watches, and records the responses.

    The first page of a list queues a reconcile of every service, because events before the list may
    have been missed.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        #: Monotonic time of the last successful response. Before the first one: of the creation.
        self.answered_at = time.monotonic()

    def open(self) -> aiohttp.ClientSession:
        """Return a new HTTP session to the API server."""
        return self._runtime.kube.client.http_session(self._record)

    async def _record(
        self, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        """Send the request, and record the response. This is a middleware of the session."""
        path, code = request.url.path, 0
        verb = "list" if path.rpartition("/")[2] in PLURALS else "get"
        if request.url.query.get("watch") == "true":
            verb = "watch"
        if verb == "watch":
            # The handlers need only the metadata. In an empty list of metadata, `items` is null,
            # which ends kopf.
            request.headers["Accept"] = METADATA
        try:
            response = await handler(request)
            code = response.status
        finally:
            self._runtime.count_request(verb, path, code)
        if code == 200:
            self.answered_at = time.monotonic()
            if verb == "list" and "continue" not in request.url.query:
                self._runtime.queue_all(path)
        return response
