"""Transfers by messages, this side's and those that peers asked for: the part of the progress thread that knows them."""

from __future__ import annotations

import ctypes as c
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable

import msgspec
import numpy as np
from numpy.typing import NDArray

from baton_kv_transfer.transports import libucp
from baton_kv_transfer.transports.base import Region
from baton_kv_transfer.transports.lane_protocol import find_inside
from baton_kv_transfer.transports.ucx_context import (
    ANSWER_AM_ID,
    FRAME_AM_ID,
    NOTIF_AM_ID,
    REQUEST_AM_ID,
    UCXContext,
    UCXWorker,
)
from baton_kv_transfer.transports.ucx_endpoints import Endpoint, Endpoints
from baton_kv_transfer.transports.ucx_messages import (
    FRAME_HEADER_BYTES,
    NUMBER_BYTES,
    Incoming,
    Outgoing,
    Request,
    draw_number,
    pack_rows,
    unpack_rows,
)
from baton_kv_transfer.transports.ucx_operation import UCXOperation

logger = logging.getLogger(__name__)

_AM_FLAG_RNDV = 1 << 17  # UCP_AM_RECV_ATTR_FLAG_RNDV: the payload is not there yet; our messages never ask for it


class Served(Incoming):
    """A peer's write into memory here."""

    client: Endpoint | None = None
    """Where the answer goes; none in the round in which it was asked for."""


class MessageService(ABC):
    """All methods belong to the progress thread."""

    _context: UCXContext
    _endpoints: Endpoints
    _worker: UCXWorker

    def __init__(self, name: str, deliver: Callable[[str, bytes], None]) -> None:
        self.num_refused = 0
        self._name = name
        self._deliver = deliver
        self._operations: list[UCXOperation] = []
        self._incoming: dict[bytes, Incoming] = {}
        self._requests: list[tuple[Request, NDArray[np.int64], str]] = []  # with rows, and why it was refused
        self._ended: list[tuple[Request, str]] = []  # served, to be answered with the error
        self._handlers = {
            NOTIF_AM_ID: self._make_handler(self._notif_arrived),
            REQUEST_AM_ID: self._make_handler(self._request_arrived),
            FRAME_AM_ID: self._make_handler(self._frame_arrived),
            ANSWER_AM_ID: self._make_handler(self._answer_arrived),
        }

    @abstractmethod
    def _send(self, operation: UCXOperation, am_id: int, header: bytes, message: bytes) -> None: ...

    @abstractmethod
    def _add(self, operation: UCXOperation) -> None: ...

    def _ask(self, operation: UCXOperation) -> None:
        operation.number = draw_number()
        operation.awaits_peer = True

        def end(error: str) -> None:
            operation.error = operation.error or error
            operation.awaits_peer = False

        if operation.op == "WRITE":
            operation.outgoing = Outgoing(operation.number, operation.local)
            operation.needs_notif = False  # it goes with the request
            expected = np.zeros((1, 2), dtype=np.int64)  # only the answer
        else:
            expected = operation.local
        self._incoming[operation.number] = Incoming(expected, end)
        request = Request(
            operation.op,
            operation.number,
            self._name,
            self._worker.address,
            operation.endpoint.connection,
            operation.notif if operation.op == "WRITE" else b"",
            pack_rows(operation.remote),
        )
        self._send(operation, REQUEST_AM_ID, b"", msgspec.msgpack.encode(request))

    def _serve(self, request: Request, rows: NDArray[np.int64], refusal: str) -> None:
        client = self._get_client(request)
        if refusal:
            self._answer(request, refusal)
        elif request.op == "READ":
            served = UCXOperation("SERVE", request.name, local=rows)
            served.endpoint, served.outgoing, served.request = client, Outgoing(request.number, rows), request
            self._add(served)
        elif isinstance(incoming := self._incoming.get(request.number), Served):
            incoming.client = client

    def _answer(self, request: Request, error: str) -> None:
        answer = UCXOperation("ANSWER", request.name)
        answer.endpoint = self._get_client(request)
        if not answer.endpoint.error:
            self._send(answer, ANSWER_AM_ID, request.number, error.encode())
        self._add(answer)

    def _get_client(self, request: Request) -> Endpoint:
        return self._endpoints.get_client(self._worker, request.name, request.address, request.connection)

    def _end_incoming(self, number: bytes, error: str) -> None:
        incoming = self._incoming.pop(number, None)
        if incoming is not None:
            incoming.end(error)

    def _deregister(self, region: Region) -> None:
        """What peers were moving from or to it ends."""
        self._context.unmap(region)
        regions = self._context.host_regions
        for number, incoming in list(self._incoming.items()):
            if isinstance(incoming, Served) and not find_inside(incoming.rows, regions).all():
                self._end_incoming(number, "the memory was deregistered")
        for operation in self._operations:
            if operation.op == "SERVE" and not find_inside(operation.local, regions).all():
                operation.error = "the memory was deregistered"

    # -- what arrives, inside ucp_worker_progress

    def _make_handler(self, arrived: Callable[[int, int, int, int], None]) -> Callable[..., int]:
        """`arrived` gets header, its length, data and its length."""

        def handle(_arg: int, header: int, header_len: int, data: int, length: int, param: int) -> int:
            try:
                if not c.c_uint64.from_address(param).value & _AM_FLAG_RNDV:
                    arrived(header, header_len, data, length)
            except Exception:
                logger.exception("a message of a peer could not be used")
            return libucp.OK

        return libucp.AmCallback(handle)

    def _notif_arrived(self, header: int, header_len: int, data: int, length: int) -> None:
        if header_len:
            sender = c.string_at(header, header_len).decode(errors="replace")
            self._deliver(sender, c.string_at(data, length))

    def _request_arrived(self, _header: int, _header_len: int, data: int, length: int) -> None:
        """A write's frames follow at once; whatever needs UCX waits for the round."""
        request = msgspec.msgpack.decode(c.string_at(data, length), type=Request)
        rows = unpack_rows(request.rows)
        refusal = ""
        if outside := int(np.count_nonzero(~find_inside(rows, self._context.host_regions))):
            self.num_refused += outside
            refusal = f"{outside} of {len(rows)} descriptors are outside the memory registered there"
        elif request.op == "WRITE":

            def end(error: str) -> None:
                if request.notif and not error:
                    self._deliver(request.name, request.notif)
                self._ended.append((request, error))

            self._incoming[request.number] = Served(rows, end)
        self._requests.append((request, rows, refusal))

    def _frame_arrived(self, header: int, header_len: int, data: int, length: int) -> None:
        if header_len != FRAME_HEADER_BYTES:
            return
        packed = c.string_at(header, header_len)
        incoming = self._incoming.get(packed[:NUMBER_BYTES])
        if incoming is None:  # nobody waits for it any more
            return
        incoming.fill(int.from_bytes(packed[NUMBER_BYTES:], "little"), data, length)
        if not incoming.missing:
            self._end_incoming(packed[:NUMBER_BYTES], "")

    def _answer_arrived(self, header: int, header_len: int, data: int, length: int) -> None:
        if header_len == NUMBER_BYTES:
            self._end_incoming(c.string_at(header, header_len), c.string_at(data, length).decode(errors="replace"))
