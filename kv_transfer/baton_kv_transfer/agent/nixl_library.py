"""Functions that load NIXL, create NIXL's agent, and add a digest to NIXL's metadata."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import struct
from collections.abc import Iterator
from typing import Any

#: UCX's settings. Environment variables override them. Commas separate settings, so a value cannot
#: be a list.
BACKEND_CONFIG = "TLS=^sm,KEEPALIVE_INTERVAL=2s"
_NAME_TAG = b"nixlSerDes|Agent"
#: Every entry of NIXL's metadata ends with this byte.
_END = b"|"
_DIGEST_TAG = b"baton"
_DIGEST_BYTES = 16


def load() -> tuple[Any, tuple[type[Exception], ...]]:
    """Return NIXL's API module, and a tuple of all exception types of the library.

    The exception types have no common base class.

    Raises:
        ValueError: NIXL is not installed.
    """
    raise_exceptions = logging.raiseExceptions
    try:
        from nixl_cu12 import _api, _bindings
    except ImportError as error:
        raise ValueError(
            f"transport nixl needs NIXL ({error}): pip install 'baton[nixl]' (package nixl-cu12), "
            "or use ucx"
        ) from error
    finally:
        logging.raiseExceptions = raise_exceptions  # NIXL sets it for the whole process
    if "NIXL_LOG_LEVEL" not in os.environ:
        logging.getLogger("nixl").setLevel(logging.WARNING)
    kinds = [
        value
        for value in vars(_bindings).values()
        if isinstance(value, type) and issubclass(value, Exception)
    ]
    return _api, tuple(kinds)


def create(api: Any, name: str) -> Any:
    """Create a NIXL agent with the UCX backend. It has no progress thread: callers must poll."""
    config = api.nixl_agent_config(
        enable_prog_thread=False,
        backends=[],
        sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
    )
    with _quiet_ucx():
        nixl = api.nixl_agent(name, config)
        nixl.create_backend("UCX", {"engine_config": BACKEND_CONFIG})
    return nixl


@contextlib.contextmanager
def _quiet_ucx() -> Iterator[None]:
    """Set UCX's log level to error while NIXL loads UCX, unless UCX_LOG_LEVEL is set.

    At the default level, UCX logs a warning for each request that is unfinished when its UCX
    worker is destroyed.
    """
    if "UCX_LOG_LEVEL" in os.environ:
        yield
        return
    os.environ["UCX_LOG_LEVEL"] = "error"
    try:
        yield
    finally:
        del os.environ["UCX_LOG_LEVEL"]


def seal(packed: bytes) -> bytes:
    """Return NIXL's metadata followed by its digest. NIXL ignores the digest."""
    return packed + _DIGEST_TAG + _digest(packed)


def unseal(metadata: bytes) -> tuple[bytes, str]:
    """Check the metadata of a NIXL agent, and remove the digest.

    Metadata without a digest is accepted, because other NIXL programs add none.

    Returns:
        The metadata without the digest, and the agent's name.

    Raises:
        ValueError: the metadata is damaged, or not from NIXL.
    """
    packed = metadata
    tail = len(metadata) - len(_DIGEST_TAG) - _DIGEST_BYTES
    if metadata[max(tail, 0) :].startswith(_DIGEST_TAG):
        packed, digest = metadata[:tail], metadata[-_DIGEST_BYTES:]
        if _digest(packed) != digest:
            raise ValueError(
                f"agent metadata of {len(metadata)} bytes is damaged: fetch it again from its agent"
            )
    try:
        if not (packed.startswith(_NAME_TAG) and packed.endswith(_END)):
            raise ValueError("its frame is broken")
        (length,) = struct.unpack_from("<Q", packed, len(_NAME_TAG))
        start = len(_NAME_TAG) + 8
        name = packed[start : start + length].decode()
        if not 0 < length <= len(packed) - start:
            raise ValueError("no name")
    except (ValueError, struct.error) as error:
        raise ValueError(
            f"agent metadata of {len(metadata)} bytes is damaged, or not of a NIXL agent "
            f"({error}): both sides must run the same transport"
        ) from None
    return packed, name


def _digest(packed: bytes) -> bytes:
    """Return the digest as hexadecimal text, so that it cannot contain NIXL's delimiter `|`."""
    return (
        hashlib.blake2b(packed, digest_size=_DIGEST_BYTES // 2, person=b"baton-nixl")
        .hexdigest()
        .encode()
    )
