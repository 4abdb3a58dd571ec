"""The version, files and components of the UCX that this process loaded."""

from __future__ import annotations

import ctypes as c
from pathlib import Path

from baton_kv_transfer.transports.ucx import library

RDMA_DEVICES = Path("/sys/class/infiniband")
#: UCX's component for RDMA over verbs: InfiniBand and RoCE.
VERBS = "ib"
_COMPONENT_ATTR_NAME = 1 << 0


class _ComponentAttr(c.Structure):
    _fields_ = [("field_mask", c.c_uint64), ("name", c.c_char * 16), ("others", c.c_uint64 * 32)]


def find_components() -> list[str]:
    """Return the names of UCX's components, such as `tcp`, `ib` and `cuda_cpy`.

    A listed component may have no device on this machine. `ib` is listed only if libibverbs is
    installed. The components for CUDA are listed only if an NVIDIA driver is installed.

    Raises:
        UCXError: UCX is missing.
    """
    library.load()
    libuct = c.CDLL("libuct.so.0")
    libuct.uct_component_query.argtypes = [c.c_void_p, c.POINTER(_ComponentAttr)]
    libuct.uct_release_component_list.argtypes = [c.c_void_p]
    components, count = c.POINTER(c.c_void_p)(), c.c_uint()
    status = libuct.uct_query_components(c.byref(components), c.byref(count))
    if status != library.OK:
        raise library.UCXError(f"UCX cannot list its components: {library.status_text(status)}")
    names = []
    for component in components[: count.value]:
        attributes = _ComponentAttr(field_mask=_COMPONENT_ATTR_NAME)
        if libuct.uct_component_query(component, c.byref(attributes)) == library.OK:
            names.append(attributes.name.decode())
    libuct.uct_release_component_list(components)
    return names


def find_libraries() -> list[str]:
    """Return the paths of the libucp files that this process has mapped.

    More than one path means that the process uses another UCX in addition to ucxx's UCX.
    """
    paths = {
        line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines()
    }
    return sorted(path for path in paths if Path(path).name.startswith("libucp"))


def describe() -> str:
    """Return the version, files and components of UCX as one line of text.

    Example: `UCX 1.21.0 (/usr/lib/libucp.so.0) with tcp, ib`.

    Raises:
        UCXError: UCX is missing.
    """
    version = library.load().ucp_get_version_string().decode()
    return f"UCX {version} ({', '.join(find_libraries())}) with {', '.join(find_components())}"


def require_rdma() -> None:
    """Check that UCX can use RDMA in this process.

    Raises:
        ValueError: UCX has no verbs component, or the machine has no RDMA device.
        UCXError: UCX is missing.
    """
    if VERBS not in find_components():
        raise ValueError(
            f"kv_transfer.rdma needs a UCX with verbs, and {describe()} has none "
            "(the wheel libucx-cu12 has no verbs): use the CUDA image, or install a system UCX "
            "with verbs, 1.17 or newer, and libibverbs, and set "
            "RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY=1; or leave out kv_transfer.rdma"
        )
    if not any(RDMA_DEVICES.glob("*")):
        raise ValueError(
            f"kv_transfer.rdma needs an RDMA device, and {RDMA_DEVICES} is empty: give the pods "
            "the resource of your RDMA device plugin in prefill.resources and "
            "decode.resources, or leave out kv_transfer.rdma"
        )
