"""Records which client owns each unfinished request.

Only the owner may end a request, and only the owner receives the request's outputs.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Iterator

from baton_engine.server.engine_io import Abort
from baton_protocol.engine_messages import EngineCoreOutput

logger = logging.getLogger(__name__)


class RequestOwners:
    """Maps the ids of unfinished requests to clients. A client is a ZMQ routing id."""

    def __init__(self, aborts: queue.SimpleQueue[Abort]) -> None:
        """Create an empty map.

        Args:
            aborts: the ABORT messages that are also in the input queue. `take_aborts` reads them
                during a step, before the loop reads them from the input queue.
        """
        self._aborts = aborts
        self._owners: dict[str, bytes] = {}

    def add(self, request_id: str, client: bytes) -> None:
        """Record the client of an accepted request."""
        self._owners[request_id] = client

    def may_act_on(self, request_id: str, client: bytes) -> bool:
        """Return whether a client may act on a request.

        A request without an owner has ended. Any client may act on its id, because the KV transfer
        of an ended request can still be cancelled.
        """
        return self._owners.get(request_id, client) == client

    def ids_to_abort(self, abort: Abort) -> list[str]:
        """Return the ids of the requests to abort for an ABORT message.

        Call this for each ABORT message that the loop takes from the input queue. Requests that
        other clients own are left out.
        """
        if not abort.taken:  # the message is also the first in `_aborts`
            self._aborts.get_nowait()
        return self._owned_ids(abort)

    def _owned_ids(self, abort: Abort) -> list[str]:
        """Return the ids of an ABORT message, without requests that other clients own.

        For a message without ids, return the ids of all requests of its client.
        """
        if abort.request_ids is None:
            return [
                request_id for request_id, owner in self._owners.items() if owner == abort.client
            ]
        return [
            request_id
            for request_id in abort.request_ids
            if self.may_act_on(request_id, abort.client)
        ]

    def take_aborts(self) -> list[str]:
        """Return the ids of the requests to abort for the ABORT messages in the input queue.

        The messages stay in the input queue, but later calls do not read them again. Requests that
        other clients own are left out.
        """
        request_ids: list[str] = []
        while True:
            try:
                abort = self._aborts.get_nowait()
            except queue.Empty:
                return request_ids
            abort.taken = True
            request_ids += self._owned_ids(abort)

    def group_by_client(
        self, outputs: list[EngineCoreOutput]
    ) -> Iterator[tuple[bytes, list[EngineCoreOutput]]]:
        """Group outputs by client. Outputs of requests without an owner are dropped.

        After the last output of a request, forget its owner.
        """
        by_client: dict[bytes, list[EngineCoreOutput]] = {}
        for output in outputs:
            client = self._owners.get(output.request_id)
            if client is None:
                continue
            if output.finished:
                del self._owners[output.request_id]
                logger.debug(
                    "request %s ended: %s %s", output.request_id, output.finish_reason, output.error
                )
            by_client.setdefault(client, []).append(output)
        return iter(by_client.items())
