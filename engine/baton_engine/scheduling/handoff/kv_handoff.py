"""Scheduler side of the KV connector: decides which blocks to offer, publish, load and free.

It does no I/O.

on a new request         offer (PRODUCE), or wait (CONSUME)
on admission             load the blocks that are not cached
on scheduling tokens     save the blocks that the step completes
when a step is sent      take_metadata
if its tokens are lost   take_back the saves of that step
when a step returns      update: continue loaded requests, free the blocks of ended sends
when a request ends      release: free its blocks now or after the transfer

A block that a peer may read, or that a transfer may still write, belongs to the transfer. It is
freed only when the worker reports the end (`finished_sending`, `load_results`). Until then, an
ended request keeps its blocks here.

PRODUCE requests are never preempted, because a peer may read their blocks once published. They
sample at most one token and get all their blocks at admission, so they never wait for memory while
they hold blocks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from baton_engine.kv_cache.manager import KVCacheManager
from baton_engine.scheduling.request import Request
from baton_kv_transfer.connector import (
    BlockSave,
    ConnectorMetadata,
    ConnectorOutput,
    LoadRequest,
    LoadResult,
    LoadWait,
)
from baton_protocol.messages import KVTransferParams


@dataclass(slots=True)
class _Send:
    """Blocks that a consumer loads from here."""

    request: Request
    num_published_blocks: int = 0
    #: Whether the save with last=True was sent.
    complete: bool = False
    cancelled: bool = False


@dataclass(slots=True)
class _Load:
    """Blocks that are loaded from a producer."""

    #: None: an empty load that only releases the producer.
    request: Request | None
    num_blocks: int
    result: LoadResult | None = None
    cancelled: bool = False


class KVHandoff:
    """The transfers of one scheduler. Without a connector it stays empty."""

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv
        self._metadata = ConnectorMetadata()
        self._sends: dict[str, _Send] = {}
        self._loads: dict[str, _Load] = {}

    def __contains__(self, transfer_id: object) -> bool:
        """Return whether the id is in use."""
        return transfer_id in self._sends or transfer_id in self._loads

    @property
    def has_metadata(self) -> bool:
        """Whether the next step carries metadata to the worker."""
        return bool(self._metadata)

    @property
    def num_held(self) -> int:
        """Number of transfers of ended requests that a peer or the transfer thread still uses."""
        transfers: list[_Send | _Load] = [*self._sends.values(), *self._loads.values()]
        return sum(transfer.request is None or transfer.request.finished for transfer in transfers)

    def take_metadata(self) -> ConnectorMetadata:
        """Return the metadata that the next step carries to the worker."""
        metadata, self._metadata = self._metadata, ConnectorMetadata()
        return metadata

    # Producer

    def offer(self, request: Request) -> None:
        """Announce a new PRODUCE request. Its consumer may subscribe from now on."""
        transfer = _transfer(request)
        self._sends[transfer.transfer_id] = _Send(request)
        self._metadata.offers[transfer.transfer_id] = transfer.peer_instance_id

    def save(self, request: Request, num_computed_tokens: int) -> None:
        """Publish the blocks that a step completes.

        Args:
            num_computed_tokens: the request's computed tokens after the step, including cached
                blocks.
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
        """Forget a discarded step's saves. The step that runs its tokens publishes the blocks."""
        for save in saves:
            send = self._sends.get(save.transfer_id)
            if send is not None:
                send.num_published_blocks = min(send.num_published_blocks, save.first_block_index)
                send.complete = False

    # Consumer

    def wait(self, request: Request) -> None:
        """Announce a new CONSUME request.

        If its load does not begin in the next step, the producer is asked to keep its blocks.
        Otherwise its lease may expire while this request waits for memory.
        """
        transfer = _transfer(request)
        self._metadata.waits[transfer.transfer_id] = LoadWait(
            transfer.remote_host, transfer.remote_port, transfer.peer_instance_id
        )

    def load(self, request: Request, num_cached_blocks: int) -> None:
        """Load the blocks of the request's known tokens that the local prefix cache lacks.

        If it lacks none, the load is empty and releases the producer's blocks.
        """
        transfer = _transfer(request)
        end = self._kv.num_blocks_for(request.num_arrival_tokens)
        hashes = self._kv.block_hashes_until(request, request.num_arrival_tokens)
        first = num_cached_blocks
        self._append_load(request, transfer, first, request.block_ids[first:end], hashes[first:end])

    def decline(self, request: Request) -> None:
        """Release the producer with an empty load. The request does not need its blocks."""
        self._append_load(None, _transfer(request), 0, [], [])

    def cancel_load(self, request: Request) -> None:
        """Cancel a load. Its result still arrives, but earlier."""
        load = self._load_of(request)
        if load is not None and load.result is None and not load.cancelled:
            load.cancelled = True
            self._metadata.cancels.append(_transfer(request).transfer_id)

    def load_result(self, request: Request) -> LoadResult | None:
        """Return the result of the request's load, or None before it arrives."""
        load = self._load_of(request)
        return load.result if load is not None else None

    def end_load(self, request: Request) -> None:
        """Return the blocks of an ended load to the request."""
        del self._loads[_transfer(request).transfer_id]

    # Both

    def release(self, request: Request, *, aborted: bool) -> None:
        """Free the blocks of a finished request: now, or once its transfer ends."""
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
        """Cancel the sends of an ended request that the client has aborted.

        No peer will load them.
        """
        for transfer_id, send in self._sends.items():
            if send.request.request_id == request_id and send.request.finished:
                self._cancel_send(transfer_id, send)

    def update(self, output: ConnectorOutput) -> list[Request]:
        """Take in the worker's report and free the blocks of ended transfers.

        Returns:
            Requests whose load has ended. `load_result` returns how.
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
