"""Scheduler side of the KV connector: which blocks are offered, published, fetched, and when they may be freed. No I/O.

    a request is accepted          offer (PRODUCE), wait (CONSUME)
    it got its blocks, or a step   load the ones that the prefix cache did not have; save what the step completes
    a step goes out                take_metadata
    its tokens are discarded       take_back what it was to publish
    it comes back                  update: loads that ended go on, sends that ended free their blocks
    a request ends                 release: frees its blocks now, or when the transfer lets go of them; decline if it had none yet

A block that a peer may read, or that the transfer may still write, belongs to the transfer: it is freed when the worker says so
(`finished_sending`, `load_results`) and never before. So a finished or aborted request may keep its blocks here for a while.

PRODUCE requests are never preempted: their blocks may be read at any time once published. They sample one token at most and get
all their blocks when admitted, so they never wait for memory while they hold some.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from baton_engine.kv_cache.manager import KVCacheManager
from baton_engine.protocol.messages import KVTransferParams
from baton_engine.scheduling.request import Request
from baton_kv_transfer.connector import (
    BlockLoad,
    BlockSave,
    ConnectorMetadata,
    ConnectorOutput,
    LoadResult,
    LoadWait,
)


@dataclass(slots=True)
class _Send:
    request: Request
    num_published_blocks: int = 0
    #: The save with last=True went out.
    complete: bool = False
    cancelled: bool = False


@dataclass(slots=True)
class _Load:
    #: None: nobody waits for the result, it only tells the producer that its blocks are not needed.
    request: Request | None
    num_blocks: int
    result: LoadResult | None = None
    cancelled: bool = False


class KVHandoff:
    """One object per scheduler, also without a connector: then it is always empty."""

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv
        self._metadata = ConnectorMetadata()
        self._sends: dict[str, _Send] = {}
        self._loads: dict[str, _Load] = {}

    def __contains__(self, transfer_id: str) -> bool:
        """Whether the id is in use."""
        return transfer_id in self._sends or transfer_id in self._loads

    @property
    def has_metadata(self) -> bool:
        """Something is to be told to the worker."""
        return bool(self._metadata)

    @property
    def num_held(self) -> int:
        """Transfers of ended requests that a peer, or the transfer thread, still needs."""
        transfers: list[_Send | _Load] = [*self._sends.values(), *self._loads.values()]
        return sum(transfer.request is None or transfer.request.finished for transfer in transfers)

    def take_metadata(self) -> ConnectorMetadata:
        """What the next step carries to the worker."""
        metadata, self._metadata = self._metadata, ConnectorMetadata()
        return metadata

    # Producer

    def offer(self, request: Request) -> None:
        """A PRODUCE request was accepted: its consumer may subscribe from now on."""
        transfer = _transfer(request)
        self._sends[transfer.transfer_id] = _Send(request)
        self._metadata.offers[transfer.transfer_id] = transfer.peer_instance_id

    def save(self, request: Request, num_computed_tokens: int) -> None:
        """Publishes what a step completes.

        Args:
            num_computed_tokens: the request's, once the step will have run. Blocks from the prefix cache count as well.
        """
        transfer_id = _transfer(request).transfer_id
        send = self._sends.get(transfer_id)
        if send is None or send.complete:  # the consumer has gone, or has been told everything
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
            BlockSave(transfer_id, first, request.block_ids[first:end], hashes[first:end], covered, last)
        )
        send.num_published_blocks = end
        send.complete = last

    def take_back(self, saves: Iterable[BlockSave]) -> None:
        """The step that was to complete these blocks has not run, and nothing was published: a later one does."""
        for save in saves:
            send = self._sends.get(save.transfer_id)
            if send is not None:
                send.num_published_blocks = min(send.num_published_blocks, save.first_block_index)
                send.complete = False

    # Consumer

    def wait(self, request: Request) -> None:
        """A CONSUME request was accepted. If its load does not begin in the next step, the producer hears that it will: memory may
        be waited for longer than a lease."""
        transfer = _transfer(request)
        self._metadata.waits[transfer.transfer_id] = LoadWait(
            transfer.remote_host, transfer.remote_port, transfer.peer_instance_id
        )

    def load(self, request: Request, num_cached_blocks: int) -> None:
        """Fetches the blocks of the request's known tokens that the local prefix cache did not have.

        If it had them all, the load is empty: it tells the producer that its blocks are not needed.
        """
        transfer = _transfer(request)
        end = self._kv.num_blocks_for(request.num_arrival_tokens)
        hashes = self._kv.block_hashes_until(request, request.num_arrival_tokens)
        first = num_cached_blocks
        self._append_load(request, transfer, first, request.block_ids[first:end], hashes[first:end])

    def decline(self, request: Request) -> None:
        """A CONSUME request ends, or goes on alone, before its load began: lets the producer go with an empty load."""
        self._append_load(None, _transfer(request), 0, [], [])

    def cancel_load(self, request: Request) -> None:
        """Shortens the wait for a load's result."""
        load = self._load_of(request)
        if load is not None and load.result is None and not load.cancelled:
            load.cancelled = True
            self._metadata.cancels.append(_transfer(request).transfer_id)

    def load_result(self, request: Request) -> LoadResult | None:
        """The result of the request's load, if it came."""
        load = self._load_of(request)
        return load.result if load is not None else None

    def end_load(self, request: Request) -> None:
        """The request goes on with what was loaded; its blocks are its own again."""
        del self._loads[_transfer(request).transfer_id]

    # Both

    def release(self, request: Request, *, aborted: bool) -> None:
        """Frees a finished request's blocks: now, or once the transfer lets go of them."""
        if request.kv_transfer is not None:
            transfer_id = request.kv_transfer.transfer_id
            send = self._sends.get(transfer_id)
            if send is not None and send.request is request:
                if self._metadata.offers.pop(transfer_id, None) is not None:
                    del self._sends[transfer_id]  # the worker never heard of it
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

    def cancel_finished(self, request_id: str) -> bool:
        """The client gave up a request that ended here already: nobody will fetch its blocks. False if there is none."""
        found = False
        for transfer_id, send in self._sends.items():
            if send.request.request_id == request_id and send.request.finished:
                self._cancel_send(transfer_id, send)
                found = True
        return found

    def update(self, output: ConnectorOutput) -> list[Request]:
        """Takes in what the worker reported, frees what it let go of.

        Returns:
            Requests whose load has ended; `load_result` has how.
        """
        ended = output.finished_sending | output.load_results.keys()
        self._metadata.cancels = [transfer_id for transfer_id in self._metadata.cancels if transfer_id not in ended]
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
            BlockLoad(
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
