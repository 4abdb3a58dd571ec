"""ctypes declarations of libucp functions, which Baton calls with the handles of ucxx's objects.

All tag messages use these functions, because ucxx cannot send a list of buffers as one message. It
also cannot cancel one request, close a failed endpoint by force, or name the lanes of an endpoint.
`cuda_support` of ucxx 0.52 tests the wrong bit and is always true, so libucp is queried instead.
The struct layouts are those of UCX's public headers, 1.17 or newer.
"""

from __future__ import annotations

import ctypes as c
import functools
import os
from typing import Any

OK = 0
INPROGRESS = 1
_FIRST_ERROR_POINTER = 2**64 - 100  # UCS_PTR_IS_ERR: status codes cast to pointers

OP_ATTR_CALLBACK = 1 << 1
OP_ATTR_USER_DATA = 1 << 2
OP_ATTR_DATATYPE = 1 << 3
OP_ATTR_FLAGS = 1 << 4
OP_ATTR_RECV_INFO = 1 << 7
DATATYPE_IOV = 2
EP_CLOSE_FORCE = 1 << 0
EP_ATTR_TRANSPORTS = 1 << 3
CONTEXT_ATTR_MEMORY_TYPES = 1 << 2
MEMORY_TYPE_CUDA = 1

#: Type of a function (request, status, user data).
SendCallback = c.CFUNCTYPE(None, c.c_void_p, c.c_int8, c.c_void_p)


class TagInfo(c.Structure):
    _fields_ = [("tag", c.c_uint64), ("length", c.c_size_t)]


#: Type of a function (request, status, information about the message, user data).
ReceiveCallback = c.CFUNCTYPE(None, c.c_void_p, c.c_int8, c.POINTER(TagInfo), c.c_void_p)


class RequestParam(c.Structure):
    _fields_ = [
        ("op_attr_mask", c.c_uint32),
        ("flags", c.c_uint32),
        ("request", c.c_void_p),
        ("callback", c.c_void_p),
        ("datatype", c.c_uint64),
        ("user_data", c.c_void_p),
        ("reply_buffer", c.c_void_p),
        ("memory_type", c.c_int),
        ("recv_info", c.c_void_p),
        ("memh", c.c_void_p),
    ]


class TransportEntry(c.Structure):
    _fields_ = [("transport_name", c.c_char_p), ("device_name", c.c_char_p)]


class EpAttr(c.Structure):
    _fields_ = [
        ("field_mask", c.c_uint64),
        ("name", c.c_char * 32),
        ("local_sockaddr", c.c_uint64 * 16),  # struct sockaddr_storage
        ("remote_sockaddr", c.c_uint64 * 16),
        ("entries", c.c_void_p),  # ucp_transports_t, up to entry_size
        ("num_entries", c.c_uint),
        ("entry_size", c.c_size_t),
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


_P = c.c_void_p
_PARAM = c.POINTER(RequestParam)
# function -> (result, arguments). Status codes are 8-bit enums. "_nbx" functions return a request,
# null, or a status as a pointer.
_PROTOTYPES: dict[str, tuple[Any, list[Any]]] = {
    "ucp_context_query": (c.c_int8, [_P, c.POINTER(ContextAttr)]),
    "ucp_ep_close_nbx": (_P, [_P, _PARAM]),
    "ucp_ep_query": (c.c_int8, [_P, c.POINTER(EpAttr)]),
    "ucp_get_version_string": (c.c_char_p, []),
    "ucp_request_cancel": (None, [_P, _P]),
    "ucp_request_free": (None, [_P]),
    "ucp_tag_msg_recv_nbx": (_P, [_P, _P, c.c_size_t, _P, _PARAM]),
    "ucp_tag_probe_nb": (_P, [_P, c.c_uint64, c.c_uint64, c.c_int, c.POINTER(TagInfo)]),
    "ucp_tag_recv_nbx": (_P, [_P, _P, c.c_size_t, c.c_uint64, c.c_uint64, _PARAM]),
    "ucp_tag_send_nbx": (_P, [_P, _P, c.c_size_t, c.c_uint64, _PARAM]),
}


class UCXError(RuntimeError):
    """A call of UCX failed, or UCX is missing."""


@functools.cache
def load() -> Any:
    """Return the libucp that ucxx loaded, with argument types set.

    The return type is Any, because the functions of a ctypes library are dynamic attributes.

    Raises:
        UCXError: ucxx is not installed.
    """
    load_ucxx()
    libucp: Any = c.CDLL("libucp.so.0")
    for name, (restype, argtypes) in _PROTOTYPES.items():
        function = getattr(libucp, name)
        function.restype, function.argtypes = restype, argtypes
    libucs: Any = c.CDLL("libucs.so.0")
    libucs.ucs_status_string.restype, libucs.ucs_status_string.argtypes = c.c_char_p, [c.c_int8]
    libucp.ucs_status_string = libucs.ucs_status_string
    return libucp


@functools.cache
def load_ucxx() -> Any:
    """Return the module with ucxx's classes, which is compiled and has no types.

    Raises:
        UCXError: ucxx is not installed.
    """
    before = {key: value for key, value in os.environ.items() if key.startswith("UCX_")}
    try:
        import ucxx._lib.libucxx
    except ImportError as error:
        raise UCXError(f"UCX is not installed ({error}): pip install ucxx-cu12") from error
    finally:
        # ucxx sets environment variables, which all UCX users of the process read. Some make UCX
        # log warnings.
        for key in [key for key in os.environ if key.startswith("UCX_") and key not in before]:
            del os.environ[key]
    return ucxx._lib.libucxx


def status_text(status: int) -> str:
    return str(load().ucs_status_string(status), "ascii")


def pointer_status(pointer: int | None) -> int:
    """Return the status in the pointer that an `_nbx` function of UCX returned.

    OK: the operation has ended. INPROGRESS: the pointer is a request. Other values are error codes.
    """
    if not pointer:
        return OK
    return pointer - 2**64 if pointer >= _FIRST_ERROR_POINTER else INPROGRESS
