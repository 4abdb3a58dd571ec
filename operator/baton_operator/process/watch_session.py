"""The HTTP session in which kopf sends its requests, with a record of the responses."""

from __future__ import annotations

import time

import aiohttp

from baton_kube.client import METADATA
from baton_operator.kube.objects import PLURALS
from baton_operator.process.runtime import Runtime


class WatchSession:
    """Opens HTTP sessions for kopf's requests, and records the responses.

    When kopf lists a collection, a reconcile of every service is queued, because kopf may have
    missed events before the list.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        #: Monotonic time of the last successful response. Before the first response: time at which
        #: this object was created.
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
            # The handlers need only the metadata. Lists are requested with all fields: in an empty
            # list of metadata, `items` is null, which ends kopf.
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
