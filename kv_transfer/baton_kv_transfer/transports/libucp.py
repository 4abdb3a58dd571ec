"""ctypes bindings of the part of libucp that one-sided transfers need; struct layouts are those of UCX's public headers.

UCX is loaded on the first call of `load()`, never at import. A ctypes call releases the GIL for its duration, so
`ucp_worker_progress` and the copies made inside `ucp_get_nbx` run beside the interpreter.
"""

from __future__ import annotations

import ctypes as c
import functools
from typing import Any

API_VERSION = (1, 17)
"""Oldest UCP API these declarations were written for; UCX keeps the ABI of newer 1.x libraries compatible."""

OK = 0
INPROGRESS = 1
ERR_BUSY = -15
_FIRST_ERROR_POINTER = 2**64 - 100  # UCS_PTR_IS_ERR: status codes cast to pointers

FEATURE_RMA = 1 << 1
FEATURE_WAKEUP = 1 << 4
PARAM_FEATURES = 1 << 0
PARAM_NAME = 1 << 8
WORKER_THREAD_MODE = 1 << 0
THREAD_MODE_SERIALIZED = 1
EP_REMOTE_ADDRESS = 1 << 0
EP_ERR_HANDLING_MODE = 1 << 1
EP_ERR_HANDLER = 1 << 2
ERR_HANDLING_PEER = 1
MEM_MAP_ADDRESS = 1 << 0
MEM_MAP_LENGTH = 1 << 1
MEM_MAP_MEMORY_TYPE = 1 << 4
ATTR_MEMORY_TYPES = 1 << 2
OP_ATTR_FLAGS = 1 << 4
EP_ATTR_TRANSPORTS = 1 << 3
EP_CLOSE_FORCE = 1 << 0

ErrorCallback = c.CFUNCTYPE(None, c.c_void_p, c.c_void_p, c.c_int8)
"""(arg, endpoint, status)"""


class Params(c.Structure):
    _fields_ = [
        ("field_mask", c.c_uint64),
        ("features", c.c_uint64),
        ("request_size", c.c_size_t),
        ("request_init", c.c_void_p),
        ("request_cleanup", c.c_void_p),
        ("tag_sender_mask", c.c_uint64),
        ("mt_workers_shared", c.c_int),
        ("estimated_num_eps", c.c_size_t),
        ("estimated_num_ppn", c.c_size_t),
        ("name", c.c_char_p),
        ("node_local_id", c.c_size_t),
    ]


class WorkerParams(c.Structure):
    _fields_ = [
        ("field_mask", c.c_uint64),
        ("thread_mode", c.c_int),
        ("cpu_mask", c.c_ulong * 16),
        ("events", c.c_uint),
        ("user_data", c.c_void_p),
        ("event_fd", c.c_int),
        ("flags", c.c_uint64),
        ("name", c.c_char_p),
        ("am_alignment", c.c_size_t),
        ("client_id", c.c_uint64),
    ]


class SockAddr(c.Structure):
    _fields_ = [("addr", c.c_void_p), ("addrlen", c.c_uint32)]


class EpParams(c.Structure):
    _fields_ = [
        ("field_mask", c.c_uint64),
        ("address", c.c_void_p),
        ("err_mode", c.c_int),
        ("err_handler_cb", ErrorCallback),
        ("err_handler_arg", c.c_void_p),
        ("user_data", c.c_void_p),
        ("flags", c.c_uint),
        ("sockaddr", SockAddr),
        ("conn_request", c.c_void_p),
        ("name", c.c_char_p),
        ("local_sockaddr", SockAddr),
    ]


class TransportEntry(c.Structure):
    _fields_ = [("transport_name", c.c_char_p), ("device_name", c.c_char_p)]


class Transports(c.Structure):
    _fields_ = [("entries", c.c_void_p), ("num_entries", c.c_uint), ("entry_size", c.c_size_t)]


class EpAttr(c.Structure):
    _fields_ = [
        ("field_mask", c.c_uint64),
        ("name", c.c_char * 32),
        ("local_sockaddr", c.c_uint64 * 16),  # struct sockaddr_storage
        ("remote_sockaddr", c.c_uint64 * 16),
        ("transports", Transports),
        ("user_data", c.c_void_p),
    ]


class ContextAttr(c.Structure):
    _fields_ = [
        ("field_mask", c.c_uint64),
        ("request_size", c.c_size_t),
        ("thread_mode", c.c_int),
        ("memory_types", c.c_uint64),
        ("name", c.c_char * 32),
        ("device_counter_size", c.c_size_t),
    ]


class MemMapParams(c.Structure):
    _fields_ = [
        ("field_mask", c.c_uint64),
        ("address", c.c_void_p),
        ("length", c.c_size_t),
        ("flags", c.c_uint),
        ("prot", c.c_uint),
        ("memory_type", c.c_int),
        ("exported_memh_buffer", c.c_void_p),
    ]


class RequestParam(c.Structure):
    _fields_ = [
        ("op_attr_mask", c.c_uint32),
        ("flags", c.c_uint32),
        ("request", c.c_void_p),
        ("cb", c.c_void_p),
        ("datatype", c.c_uint64),
        ("user_data", c.c_void_p),
        ("reply_buffer", c.c_void_p),
        ("memory_type", c.c_int),
        ("recv_info", c.c_void_p),
        ("memh", c.c_void_p),
    ]


_P = c.c_void_p
_PP = c.POINTER(c.c_void_p)
_PSIZE = c.POINTER(c.c_size_t)
_PREQ = c.POINTER(RequestParam)

# function -> (result, arguments); status codes are 8-bit enums, "_nbx" functions return a request, null or a status as pointer
_PROTOTYPES: dict[str, tuple[Any, list[Any]]] = {
    "ucp_config_read": (c.c_int8, [c.c_char_p, c.c_char_p, _PP]),
    "ucp_config_modify": (c.c_int8, [_P, c.c_char_p, c.c_char_p]),
    "ucp_config_release": (None, [_P]),
    "ucp_init_version": (c.c_int8, [c.c_uint, c.c_uint, c.POINTER(Params), _P, _PP]),
    "ucp_context_query": (c.c_int8, [_P, c.POINTER(ContextAttr)]),
    "ucp_cleanup": (None, [_P]),
    "ucp_worker_create": (c.c_int8, [_P, c.POINTER(WorkerParams), _PP]),
    "ucp_worker_destroy": (None, [_P]),
    "ucp_worker_get_address": (c.c_int8, [_P, _PP, _PSIZE]),
    "ucp_worker_release_address": (None, [_P, _P]),
    "ucp_worker_progress": (c.c_uint, [_P]),
    "ucp_worker_get_efd": (c.c_int8, [_P, c.POINTER(c.c_int)]),
    "ucp_worker_arm": (c.c_int8, [_P]),
    "ucp_worker_signal": (c.c_int8, [_P]),
    "ucp_ep_create": (c.c_int8, [_P, c.POINTER(EpParams), _PP]),
    "ucp_ep_query": (c.c_int8, [_P, c.POINTER(EpAttr)]),
    "ucp_ep_close_nbx": (_P, [_P, _PREQ]),
    "ucp_ep_flush_nbx": (_P, [_P, _PREQ]),
    "ucp_ep_rkey_unpack": (c.c_int8, [_P, c.c_char_p, _PP]),
    "ucp_rkey_pack": (c.c_int8, [_P, _P, _PP, _PSIZE]),
    "ucp_rkey_buffer_release": (None, [_P]),
    "ucp_rkey_destroy": (None, [_P]),
    "ucp_mem_map": (c.c_int8, [_P, c.POINTER(MemMapParams), _PP]),
    "ucp_mem_unmap": (c.c_int8, [_P, _P]),
    "ucp_get_nbx": (_P, [_P, _P, c.c_size_t, c.c_uint64, _P, _PREQ]),
    "ucp_put_nbx": (_P, [_P, _P, c.c_size_t, c.c_uint64, _P, _PREQ]),
    "ucp_request_check_status": (c.c_int8, [_P]),
    "ucp_request_free": (None, [_P]),
}


class UCXError(RuntimeError):
    """A call into UCX failed; the text names the call and UCX's status."""


@functools.cache
def load() -> Any:
    """libucp with argument types set. `Any`: a ctypes library has its functions as dynamic attributes.

    Raises:
        UCXError: the libraries are not installed.
    """
    try:
        import libucx
    except ImportError as error:
        raise UCXError("UCX is not installed: pip install libucx-cu12 (it comes with ucxx-cu12)") from error
    libucs, _, _, libucp = libucx.load_library()
    if libucp is None:
        raise UCXError("libucp.so was not found in the libucx package: reinstall libucx-cu12")
    for name, (restype, argtypes) in _PROTOTYPES.items():
        function = getattr(libucp, name)
        function.restype, function.argtypes = restype, argtypes
    libucs.ucs_status_string.restype, libucs.ucs_status_string.argtypes = c.c_char_p, [c.c_int8]
    libucp.ucs_status_string = libucs.ucs_status_string
    return libucp


def status_text(status: int) -> str:
    text: bytes = load().ucs_status_string(status)
    return text.decode()


def check(status: int, call: str) -> None:
    """Raises UCXError unless `status` is UCS_OK."""
    if status != OK:
        raise UCXError(f"{call}: {status_text(status)}")


def pointer_status(pointer: int | None) -> int:
    """Status of what an `_nbx` call returned: OK (done at once), INPROGRESS (a request) or an error code."""
    if not pointer:
        return OK
    return pointer - 2**64 if pointer >= _FIRST_ERROR_POINTER else INPROGRESS
