"""UCX as the transport uses it: one context with the registered memory, and the workers that peers connect to."""

from __future__ import annotations

import ctypes as c
import os
from collections.abc import Callable
from typing import Any

from baton_kv_transfer.transports import libucp
from baton_kv_transfer.transports.base import MEM_TYPES, Region

SETTINGS = {
    "UCX_KEEPALIVE_INTERVAL": "2s",  # how often silent peers are probed
    # Where UCX connects by TCP, its progress thread waits meanwhile: a host that is cut off must not hold it up for long.
    "UCX_TCP_SYN_CNT": "1",
}
"""Used unless the environment says otherwise."""
_UCX_MEMORY_TYPES = dict(zip(MEM_TYPES, (0, 1), strict=True))  # UCS_MEMORY_TYPE_HOST, UCS_MEMORY_TYPE_CUDA


class UCXContext:
    """All methods but the constructor belong to one thread."""

    def __init__(self, name: str) -> None:
        """
        Raises:
            UCXError: UCX is missing or does not start.
        """
        self.ucp = libucp.load()
        self._handle = self._create(name)
        self._memory: dict[int, tuple[Region, int]] = {}

    def map(self, address: int, length: int, mem_type: str, device_id: int) -> Region:
        """Registers memory.

        Raises:
            ValueError: UCX cannot reach memory of this type here.
            UCXError: it cannot be registered.
        """
        memory_type = self._find_memory_type(mem_type)
        params = libucp.MemMapParams(
            field_mask=libucp.MEM_MAP_ADDRESS | libucp.MEM_MAP_LENGTH | libucp.MEM_MAP_MEMORY_TYPE,
            address=address,
            length=length,
            memory_type=memory_type,
        )
        memh = c.c_void_p()
        status = self.ucp.ucp_mem_map(self._handle, c.byref(params), c.byref(memh))
        libucp.check(status, f"ucp_mem_map of {length} bytes ({mem_type})")
        buffer, size = c.c_void_p(), c.c_size_t()
        status = self.ucp.ucp_rkey_pack(self._handle, memh, c.byref(buffer), c.byref(size))
        libucp.check(status, "ucp_rkey_pack")
        region = Region(address, length, c.string_at(buffer, size.value), mem_type, device_id)
        self.ucp.ucp_rkey_buffer_release(buffer)
        assert memh.value is not None
        self._memory[address] = (region, memh.value)
        return region

    def unmap(self, region: Region) -> None:
        _, memh = self._memory.pop(region.address)
        libucp.check(self.ucp.ucp_mem_unmap(self._handle, memh), "ucp_mem_unmap")

    def create_worker(self) -> UCXWorker:
        params = libucp.WorkerParams(field_mask=libucp.WORKER_THREAD_MODE, thread_mode=libucp.THREAD_MODE_SERIALIZED)
        worker = c.c_void_p()
        libucp.check(self.ucp.ucp_worker_create(self._handle, c.byref(params), c.byref(worker)), "ucp_worker_create")
        assert worker.value is not None
        return UCXWorker(self.ucp, worker.value)

    def destroy(self) -> None:
        """After all workers."""
        for region, _ in list(self._memory.values()):
            self.unmap(region)
        self.ucp.ucp_cleanup(self._handle)

    def _create(self, name: str) -> int:
        ucp = self.ucp
        config = c.c_void_p()
        libucp.check(ucp.ucp_config_read(None, None, c.byref(config)), "ucp_config_read")
        try:
            settings = {key: value for key, value in SETTINGS.items() if key not in os.environ}
            for key, value in settings.items():
                status = ucp.ucp_config_modify(config, key.removeprefix("UCX_").encode(), value.encode())
                libucp.check(status, f"ucp_config_modify({key})")
            params = libucp.Params(
                field_mask=libucp.PARAM_FEATURES | libucp.PARAM_NAME,
                features=libucp.FEATURE_RMA | libucp.FEATURE_WAKEUP,
                name=name.encode(),
            )
            context = c.c_void_p()
            status = ucp.ucp_init_version(*libucp.API_VERSION, c.byref(params), config, c.byref(context))
            libucp.check(status, "ucp_init (is UCX_TLS or UCX_NET_DEVICES set to something this machine lacks?)")
        finally:
            ucp.ucp_config_release(config)
        assert context.value is not None
        return context.value

    def _find_memory_type(self, mem_type: str) -> int:
        memory_type = _UCX_MEMORY_TYPES.get(mem_type)
        if memory_type is None:
            raise ValueError(f"memory type must be one of {', '.join(MEM_TYPES)}, got {mem_type!r}")
        attributes = libucp.ContextAttr(field_mask=libucp.ATTR_MEMORY_TYPES)
        libucp.check(self.ucp.ucp_context_query(self._handle, c.byref(attributes)), "ucp_context_query")
        if not attributes.memory_types >> memory_type & 1:
            raise ValueError(
                f"UCX does not reach {mem_type} here: it needs libucx's cuda modules, an NVIDIA driver, "
                f"and cuda_copy in UCX_TLS where that is set (now {os.environ.get('UCX_TLS', 'not set')})"
            )
        return memory_type


class UCXWorker:
    """What peers connect to, and all connections. Destroying it cuts them all."""

    def __init__(self, ucp: Any, handle: int) -> None:
        self._ucp = ucp
        self.handle = handle
        self.destroyed = False
        self.address = self._get_address()
        self.event_fd = self._get_event_fd()

    @property
    def signal(self) -> Callable[[], None]:
        """Wakes who sleeps on the event descriptor; from any thread."""
        return lambda: self._ucp.ucp_worker_signal(self.handle)

    def destroy(self) -> None:
        self.destroyed = True
        self._ucp.ucp_worker_destroy(self.handle)

    def _get_address(self) -> bytes:
        address, length = c.c_void_p(), c.c_size_t()
        status = self._ucp.ucp_worker_get_address(self.handle, c.byref(address), c.byref(length))
        libucp.check(status, "ucp_worker_get_address")
        packed = c.string_at(address, length.value)
        self._ucp.ucp_worker_release_address(self.handle, address)
        return packed

    def _get_event_fd(self) -> int:
        fd = c.c_int()
        libucp.check(self._ucp.ucp_worker_get_efd(self.handle, c.byref(fd)), "ucp_worker_get_efd")
        return fd.value
