"""Keeps the latest conversations of `/v1/responses`, for `previous_response_id`."""

from __future__ import annotations

import re
import threading
from collections import Counter, OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import msgspec

from baton_gateway.errors import APIError
from baton_protocol.process.cgroups import memory_limit
from baton_text.chat_messages import ChatMessage
from baton_text.responses.responses_api import Response

#: All stored conversations have at most MAX_STORED_BYTES, and at most 1 / MEMORY_SHARE of the
#: container's memory limit. The oldest conversations are deleted first.
MAX_STORED_BYTES = 2**26
MEMORY_SHARE = 16
#: Limit on the bytes of one conversation. A longer conversation is not stored. This is also the
#: limit on the bytes of all stored responses whose items one request references.
MAX_CONVERSATION_BYTES = 2**22
#: The conversations of one client with an API key take at most 1 / CLIENT_SHARE of the limit.
CLIENT_SHARE = 4
#: Memory that a stored response takes besides its JSON, in bytes.
OVERHEAD_BYTES = 2**10

#: Name of the client, and id of the response.
_Key = tuple[str | None, str]
_ITEM_ID = re.compile(r"[a-z]{1,9}_(\w{1,99})_[0-9]{1,9}", re.ASCII)
#: Limit on the number of items of stored responses that one request references.
MAX_REFERENCES = 1024


def new_item_id(prefix: str, response_id: str, index: int) -> str:
    """Return an id for an item of a response. The item's id contains the response's id."""
    return f"{prefix}_{response_id.removeprefix('resp_')}_{index}"


@dataclass(frozen=True)
class StoredResponse:
    """A response and its conversation in JSON, which takes much less memory than Python objects.

    Args:
        response: the response.
        messages: the conversation including the response, without instructions.
    """

    response: bytes
    messages: bytes

    @property
    def size(self) -> int:
        return len(self.response) + len(self.messages) + OVERHEAD_BYTES


class ResponseStore:
    """Keeps the latest responses of each client in memory. Thread-safe.

    If clients need no API key, all of them count as one client with the name None.

    Args:
        max_bytes: limit on `num_bytes`. A container with little memory has a lower limit.
    """

    def __init__(self, max_bytes: int = MAX_STORED_BYTES) -> None:
        limit = memory_limit()
        self._max_bytes = max_bytes if limit is None else min(max_bytes, limit // MEMORY_SHARE)
        self._lock = threading.Lock()
        #: The responses of all clients, by client and id, oldest first.
        self._stored: OrderedDict[_Key, StoredResponse] = OrderedDict()
        #: The keys of the responses of each client, oldest first.
        self._by_client: dict[str | None, OrderedDict[_Key, None]] = {}
        self._sizes: Counter[str | None] = Counter()

    @property
    def num_bytes(self) -> int:
        """Bytes of all stored responses and their conversations, with OVERHEAD_BYTES for each."""
        with self._lock:
            return self._sizes.total()

    def put(
        self,
        response: Response,
        messages: Sequence[ChatMessage | msgspec.Raw],
        client: str | None,
    ) -> None:
        """Store a response with its conversation `messages`, unless they are too long together.

        The oldest responses are deleted while those of the client exceed the limit per client, or
        all responses exceed the limit of the store.
        """
        stored = StoredResponse(msgspec.json.encode(response), msgspec.json.encode(messages))
        limit = self._max_bytes if client is None else self._max_bytes // CLIENT_SHARE
        if stored.size > min(limit, MAX_CONVERSATION_BYTES):
            return
        with self._lock:
            key = client, response.id
            self._stored[key] = stored
            self._by_client.setdefault(client, OrderedDict())[key] = None
            self._sizes[client] += stored.size
            while self._sizes[client] > limit:
                self._forget(next(iter(self._by_client[client])))
            while self._sizes.total() > self._max_bytes:
                self._forget(next(iter(self._stored)))

    def get(self, response_id: str, client: str | None) -> bytes:
        """Return the JSON of the client's response with this id.

        Raises:
            APIError: 404, no such response of this client is stored.
        """
        return self._find(response_id, client, 404).response

    def delete(self, response_id: str, client: str | None) -> None:
        """Delete the client's response with this id.

        Raises:
            APIError: 404, no such response of this client is stored.
        """
        self._find(response_id, client, 404)
        with self._lock:
            self._forget((client, response_id))

    def earlier(
        self, previous_id: str | None, item_ids: Collection[str], client: str | None
    ) -> bytes:
        """Return the stored messages and responses to which a request refers.

        The result is the JSON of a struct `Earlier`, or empty if the request refers to nothing.

        Args:
            previous_id: id of the response to continue. None if the request continues no response.
            item_ids: ids of items of stored responses.
            client: name of the client; None if clients need no API key.

        Raises:
            APIError: 400, a response of these ids is not stored for this client, there are too
                many items, or the responses of the items have too many bytes.
        """
        if len(item_ids) > MAX_REFERENCES:
            raise APIError(
                400,
                f"input has {len(item_ids)} references to items, and at most {MAX_REFERENCES} are "
                "allowed. Send the items themselves.",
                param="input",
            )
        messages = b"[]"
        if previous_id is not None:
            messages = self._find(previous_id, client, 400, "previous_response_id").messages
        responses: dict[str, bytes] = {}
        for item_id in item_ids:
            match = _ITEM_ID.fullmatch(item_id)
            response_id = f"resp_{match[1]}" if match else ""
            what = f"Item {item_id[:100]!r}"
            stored = self._find(response_id, client, 400, "input", what)
            responses[response_id] = stored.response
        if sum(map(len, responses.values())) > MAX_CONVERSATION_BYTES:
            raise APIError(
                400,
                f"The responses of the items have more than {MAX_CONVERSATION_BYTES} bytes. Send "
                "the items themselves as input.",
                param="input",
            )
        if previous_id is None and not responses:
            return b""
        return b'{"messages":%b,"responses":[%b]}' % (messages, b",".join(responses.values()))

    def _find(
        self,
        response_id: str,
        client: str | None,
        status: int,
        param: str = "response_id",
        what: str = "",
    ) -> StoredResponse:
        with self._lock:
            stored = self._stored.get((client, response_id))
        if stored is not None:
            return stored
        what = what or f"Response {response_id[:100]!r}"
        message = (
            f"{what} is not stored here. Each gateway keeps only its own responses, the latest "
            f"{self._max_bytes / 2**20:.3g} MiB of them, unless they were made with store=false. "
            "Send the whole conversation as input."
        )
        raise APIError(status, message, param=param, code="previous_response_not_found")

    def _forget(self, key: _Key) -> None:
        if (stored := self._stored.pop(key, None)) is None:
            return  # another thread has forgotten it
        client, _ = key
        del self._by_client[client][key]
        self._sizes[client] -= stored.size
        if not self._by_client[client]:
            del self._by_client[client], self._sizes[client]
