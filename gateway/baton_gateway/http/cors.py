"""Cross-origin resource sharing (CORS), with which browser pages of other origins may call the API.

Before most requests of a page, a browser sends a preflight without the API key. The browser gives a
response to the page only if the response's headers allow the origin of the page.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Collection

from aiohttp import hdrs, web

from baton_gateway.http.request_id import REQUEST_ID_HEADER

#: Seconds for which browsers keep the response to a preflight.
MAX_AGE_S = 600
#: Response headers that pages may read, in addition to the headers that browsers always expose.
EXPOSED_HEADERS = f"{hdrs.RETRY_AFTER}, {REQUEST_ID_HEADER}"
#: Matches a preflight's list of request headers. Repeating the list in the response allows them.
_HEADER_NAMES = re.compile(r"[-\w, ]{1,1024}", re.ASCII)


class CORS:
    """Answers preflights, and sets the CORS headers of responses.

    Args:
        allowed_origins: origins as in a browser's Origin header, such as
            `https://chat.example.com`. `*` allows every origin. Without origins, CORS is off.
    """

    def __init__(self, allowed_origins: Collection[str]) -> None:
        self._origins = frozenset(allowed_origins)

    def headers(self, request: web.BaseRequest) -> dict[str, str]:
        """Return the CORS headers for a response to `request`; empty if CORS is off.

        If the origin of `request` is not allowed, the only header is Vary.
        """
        if not self._origins:
            return {}
        headers: dict[str, str] = {}
        if "*" in self._origins:
            origin = "*"
        else:
            origin = request.headers.get(hdrs.ORIGIN, "")
            headers[hdrs.VARY] = hdrs.ORIGIN  # caches must not give the response to other origins
        if origin in self._origins:
            headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = origin
            headers[hdrs.ACCESS_CONTROL_EXPOSE_HEADERS] = EXPOSED_HEADERS
        return headers

    async def set_headers(self, request: web.BaseRequest, response: web.StreamResponse) -> None:
        """Set the CORS headers of `response`, as a handler of aiohttp's `on_response_prepare`."""
        response.headers.update(self.headers(request))

    @web.middleware
    async def middleware(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Answer a preflight of an allowed origin. Pass all other requests to `handler`."""
        is_preflight = (
            request.method == hdrs.METH_OPTIONS
            and hdrs.ORIGIN in request.headers
            and hdrs.ACCESS_CONTROL_REQUEST_METHOD in request.headers
        )
        if not is_preflight or hdrs.ACCESS_CONTROL_ALLOW_ORIGIN not in self.headers(request):
            return await handler(request)
        headers = {
            hdrs.ACCESS_CONTROL_ALLOW_METHODS: "GET, POST, DELETE",
            hdrs.ACCESS_CONTROL_MAX_AGE: str(MAX_AGE_S),
        }
        names = request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS, "")
        if _HEADER_NAMES.fullmatch(names):
            headers[hdrs.ACCESS_CONTROL_ALLOW_HEADERS] = names
        return web.Response(status=204, headers=headers)
