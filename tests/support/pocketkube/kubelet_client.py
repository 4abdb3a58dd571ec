"""A client of a kubelet's server, with the WebSocket protocols of exec, attach and port-forward."""

import asyncio
import ssl
from collections.abc import Iterable

import aiohttp

from pocketkube.certificates import Certificates
from pocketkube.containers.process import ContainerProcess

V4, V5 = "v4.channel.k8s.io", "v5.channel.k8s.io"
SUCCESS = {"metadata": {}, "status": "Success"}


class Kubelet:
    """A kubelet's server with one pod, and a client."""

    def __init__(
        self, server: str, session: aiohttp.ClientSession, container: ContainerProcess
    ) -> None:
        self.server = server
        self.session = session
        self.container = container

    async def connect(
        self, path: str, protocol: str, query: Iterable[tuple[str, str]] = ()
    ) -> aiohttp.ClientWebSocketResponse:
        return await self.session.ws_connect(
            self.server + path, protocols=[protocol], params=list(query)
        )

    async def exec(
        self, *argv: str, protocol: str = V5, streams: str = "output error"
    ) -> aiohttp.ClientWebSocketResponse:
        query = [*(("command", word) for word in argv), *((name, "1") for name in streams.split())]
        return await self.connect("/exec/ns/p/main", protocol, query)


async def channels(socket: aiohttp.ClientWebSocketResponse) -> dict[int, bytes]:
    """Read until the server closes the socket. Return the bytes of each channel."""
    received: dict[int, bytes] = {}
    async with asyncio.timeout(30):
        async for message in socket:
            number = message.data[0]
            received[number] = received.get(number, b"") + message.data[1:]
    assert socket.close_code == aiohttp.WSCloseCode.OK
    return received


def client_context(cluster: Certificates | None) -> ssl.SSLContext:
    """Return the TLS context of an API server; None: of another client."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if cluster is not None:
        context.load_cert_chain(cluster.client_certificate, cluster.client_key)
    return context
