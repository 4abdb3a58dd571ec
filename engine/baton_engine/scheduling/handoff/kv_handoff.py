"""Scheduler side of the KV connector: decides which blocks to publish, load and free.

This side does no I/O. A PRODUCE request computes KV blocks for a peer. A CONSUME request loads KV
blocks from a peer.

    event                        method
    a PRODUCE request arrives    offer: permit the consumer to fetch the blocks
    a CONSUME request arrives    wait: ask the producer to keep the blocks for the request
    a CONSUME request starts     load: request the blocks that the prefix cache lacks
    a step runs prompt tokens    save: publish the blocks that the step completes
    a step is complete           take_metadata: return the connector metadata for the step
    a step is discarded          take_back: undo the saves of the step
    a step's results arrive      update: return loaded requests, free the blocks of ended sends
    a request ends               release: free the blocks at once, or after the transfer

Even if a request has ended, a block that a transfer may use stays allocated until the worker has
reported the transfer's end (`finished_sending`, `load_results`).

PRODUCE requests are never preempted, because a peer may read their published blocks. A PRODUCE
request samples at most one token and gets all its blocks at admission, so it never waits for memory
while it holds blocks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from baton_engine.kv_cache.kv_cache_manager import KVCacheManager
from baton_engine.scheduling.request import Request
from baton_kv_transfer.connector import (
    BlockSave,
    ConnectorMetadata,
    ConnectorOutput,
    LoadRequest,
    LoadResult,
    LoadWait,
)
from baton_protocol.engine_messages import KVTransferParams


@dataclass(slots=True)
class _Send:
    """A transfer of a request's blocks from this engine to a peer (KVSide.PRODUCE)."""

    request: Request
    num_published_blocks: int = 0
    #: Whether the last save, with last=True, has been added to a step.
    complete: bool = False
    cancelled: bool = False


@dataclass(slots=True)
class _Load:
    """A transfer of blocks from a peer to this engine (KVSide.CONSUME)."""

    #: None: an empty load that only releases the producer's blocks.
    request: Request | None
    num_blocks: int
    result: LoadResult | None = None
    cancelled: bool = False


class KVHandoff:
    """The KV transfers of one scheduler. Empty if the engine has no KV connector."""

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv
        self._metadata = ConnectorMetadata()
        self._sends: dict[str, _Send] = {}
        self._loads: dict[str, _Load] = {}

    def __contains__(self, transfer_id: object) -> bool:
        """Return whether a transfer with this id is in progress."""
        return transfer_id in self._sends or transfer_id in self._loads

    @property
    def has_metadata(self) -> bool:
        """Whether there is connector metadata for the next step to carry to the workers."""
        return bool(self._metadata)

    @property
    def num_held(self) -> int:
        """Number of transfers in progress that belong to no unfinished request.

        These are the transfers of ended requests, and empty loads. An empty load transfers no
        blocks, and only makes the producer free the request's blocks.
        """
        transfers: list[_Send | _Load] = [*self._sends.values(), *self._loads.values()]
        return sum(transfer.request is None or transfer.request.finished for transfer in transfers)

    def take_metadata(self) -> ConnectorMetadata:
        """Remove and return the connector metadata that the next step carries to the workers."""
        metadata, self._metadata = self._metadata, ConnectorMetadata()
        return metadata

    # Producer

    def offer(self, request: Request) -> None:
        """Offer the blocks of a new request to the peer that loads the request's KV."""
        transfer = _transfer(request)
        self._sends[transfer.transfer_id] = _Send(request)
        self._metadata.offers[transfer.transfer_id] = transfer.peer_instance_id

    def save(self, request: Request, num_computed_tokens: int) -> None:
        """Publish, for the peer that loads the request's KV, the blocks that a step completes.

        Only KV of the tokens that the request had on arrival is published. The block that holds the
        last of these tokens is published even if the block is not full. If the transfer has
        ended, nothing is published.

        Args:
            num_computed_tokens: number of the request's tokens that have KV after the step,
                including tokens of cached blocks.
        """
        transfer_id = _transfer(request).transfer_id
        send = self._sends.get(transfer_id)
        if send is None or send.complete:  # the transfer has ended, or has all saves
            return
        num_tokens = min(num_computed_tokens, request.num_arrival_tokens)
        last = num_tokens == request.num_arrival_tokens
        first = send.num_published_blocks
        end = self._kv.num_blocks_for(num_tokens) if last else num_tokens // self._kv.block_size
        if end == first and not last:
            return
        hashes = self._kv.block_hashes_until(request, num_tokens)
        covered = num_tokens if last else end * self._kv.block_size
        self._metadata.saves.append(
            BlockSave(
                transfer_id, first, request.block_ids[first:end], hashes[first:end], covered, last
            )
        )
        send.num_published_blocks = end
        send.complete = last

    def take_back(self, saves: Iterable[BlockSave]) -> None:
        """Undo the saves of a discarded step, so that a later step publishes the blocks again."""
        for save in saves:
            send = self._sends.get(save.transfer_id)
            if send is not None:
                send.num_published_blocks = min(send.num_published_blocks, save.first_block_index)
                send.complete = False

    # Consumer

    def wait(self, request: Request) -> None:
        """Keep the prompt's blocks on the producer until the request's load starts.

        The connector sends heartbeats, which extend the lease of the blocks. Without heartbeats,
        the lease could expire while the request waits for memory. If the load starts in the next
        step, this method has no effect.
        """
        transfer = _transfer(request)
        self._metadata.waits[transfer.transfer_id] = LoadWait(
            transfer.remote_host, transfer.remote_port, transfer.peer_instance_id
        )

    def load(self, request: Request, num_cached_blocks: int) -> None:
        """Load a request's KV blocks from the producer, except the first `num_cached_blocks`.

        If all blocks are cached, the load is empty and only releases the producer's blocks.
        """
        transfer = _transfer(request)
        end = self._kv.num_blocks_for(request.num_arrival_tokens)
        hashes = self._kv.block_hashes_until(request, request.num_arrival_tokens)
        first = num_cached_blocks
        self._append_load(request, transfer, first, request.block_ids[first:end], hashes[first:end])

    def decline(self, request: Request) -> None:
        """Start an empty load for a request that needs no blocks from the producer.

        The empty load makes the producer free the blocks.
        """
        self._append_load(None, _transfer(request), 0, [], [])

    def cancel_load(self, request: Request) -> None:
        """Ask the connector to cancel the load of a request. The load still ends with a result."""
        load = self._load_of(request)
        if load is not None and load.result is None and not load.cancelled:
            load.cancelled = True
            self._metadata.cancels.append(_transfer(request).transfer_id)

    def load_result(self, request: Request) -> LoadResult | None:
        """Return the result of the request's load, or None if the load has not ended."""
        load = self._load_of(request)
        return load.result if load is not None else None

    def end_load(self, request: Request) -> None:
        """Remove a load that has ended. After this call, no transfer uses the request's blocks."""
        del self._loads[_transfer(request).transfer_id]

    # Both

    def release(self, request: Request, *, aborted: bool) -> None:
        """Free the blocks of a finished request, now or when the request's transfer ends.

        Args:
            aborted: whether the request was aborted or failed. If so, its transfer to a peer is
                cancelled even if all blocks are published.
        """
        if request.kv_transfer is not None:
            transfer_id = request.kv_transfer.transfer_id
            send = self._sends.get(transfer_id)
            if send is not None and send.request is request:
                if self._metadata.offers.pop(transfer_id, None) is not None:
                    del self._sends[transfer_id]  # the worker has not received the offer
                else:
                    if aborted or not send.complete:
                        self._cancel_send(transfer_id, send)
                    return
            load = self._load_of(request)
            if load is not None:
                if load.result is None:
                    self.cancel_load(request)
                    return
                del self._loads[transfer_id]
        self._kv.free(request)

    def cancel_finished(self, request_id: str) -> None:
        """Cancel the transfer to a peer of a request that has already ended.

        The client has aborted the request, so no peer will load the blocks.
        """
        for transfer_id, send in self._sends.items():
            if send.request.request_id == request_id and send.request.finished:
                self._cancel_send(transfer_id, send)

    def update(self, output: ConnectorOutput) -> list[Request]:
        """Record ended transfers, and free the blocks that only these transfers still used.

        Returns:
            Unfinished requests whose load has ended. `load_result` returns the result of each.
        """
        ended = output.finished_sending | output.load_results.keys()
        self._metadata.cancels = [
            transfer_id for transfer_id in self._metadata.cancels if transfer_id not in ended
        ]
        for transfer_id in output.finished_sending:
            send = self._sends.pop(transfer_id, None)
            if send is not None and send.request.finished:
                self._kv.free(send.request)
        loaded = []
        for transfer_id, result in output.load_results.items():
            load = self._loads.get(transfer_id)
            if load is None or load.result is not None:
                continue
            load.result = result
            result.num_valid_blocks = min(result.num_valid_blocks, load.num_blocks)
            if load.request is None:
                del self._loads[transfer_id]
            elif load.request.finished:
                del self._loads[transfer_id]
                self._kv.free(load.request)
            else:
                loaded.append(load.request)
        return loaded

    def _append_load(
        self,
        request: Request | None,
        transfer: KVTransferParams,
        first: int,
        block_ids: list[int],
        block_hashes: list[bytes],
    ) -> None:
        self._loads[transfer.transfer_id] = _Load(request, len(block_ids))
        self._metadata.waits.pop(transfer.transfer_id, None)
        self._metadata.loads.append(
            LoadRequest(
                transfer_id=transfer.transfer_id,
                remote_host=transfer.remote_host,
                remote_port=transfer.remote_port,
                peer_instance_id=transfer.peer_instance_id,
                first_block_index=first,
                block_ids=block_ids,
                block_hashes=block_hashes,
            )
        )

    def _load_of(self, request: Request) -> _Load | None:
        if request.kv_transfer is None:
            return None
        load = self._loads.get(request.kv_transfer.transfer_id)
        return load if load is not None and load.request is request else None

    def _cancel_send(self, transfer_id: str, send: _Send) -> None:
        if not send.cancelled:
            send.cancelled = True
            self._metadata.cancels.append(transfer_id)


def _transfer(request: Request) -> KVTransferParams:
    assert request.kv_transfer is not None
    return request.kv_transfer
