"""The loaded UCX: what the engine logs, and errors when RDMA is unavailable."""

from __future__ import annotations

import importlib.util
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from baton_kv_transfer.agent.agent_factory import create_agent
from baton_kv_transfer.transfer_connector import TransferConnector
from baton_kv_transfer.transports.ucx import capabilities
from baton_protocol.options.config import KVRole, KVTransferConfig

ROOT = Path(__file__).parents[5]
SWITCHED = """
import numpy as np
from baton_kv_transfer.agent.agent_factory import create_agent
from baton_kv_transfer.transports.ucx import capabilities

print(capabilities.describe())
agent = create_agent("a", "ucx")
peer = create_agent("b", "ucx")
words, copied = np.arange(2**17, dtype=np.int64), np.zeros(2**17, dtype=np.int64)
agent.register_memory([(words.ctypes.data, words.nbytes, 0, "")])
peer.register_memory([(copied.ctypes.data, copied.nbytes, 0, "")])
peer.add_remote_agent(agent.get_agent_metadata())
sides = [peer.get_xfer_descs([(side.ctypes.data, side.nbytes, 0)]) for side in (copied, words)]
handle = peer.initialize_xfer("READ", *sides, "a")
peer.transfer(handle)
while peer.check_xfer_state(handle) == "PROC":
    pass
print(peer.check_xfer_state(handle), bool((words == copied).all()), peer.bytes_moved)
print([line.split()[-1] for line in open("/proc/self/maps") if "libuc" in line])
peer.close()
agent.close()
"""


def test_the_engine_logs_the_version_the_files_and_the_transports_of_its_ucx(
    caplog: pytest.LogCaptureFixture,
) -> None:
    description = capabilities.describe()
    assert all(capabilities.find_libraries()), description
    assert {"tcp", "self"} <= set(capabilities.find_components())
    assert all(word in description for word in ("UCX 1.", "libucp.so", "tcp"))
    caplog.set_level(logging.INFO)
    create_agent("a", "ucx").close()
    assert f"KV transfers use {description}; UCX_TLS=^sm selects among them" in caplog.messages


@pytest.fixture
def without_devices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(capabilities, "RDMA_DEVICES", tmp_path)


def test_rdma_without_verbs_is_refused_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capabilities, "find_components", lambda: ["self", "tcp", "cma"])
    config = KVTransferConfig(role=KVRole.CONSUMER, rdma=True)
    with pytest.raises(
        ValueError, match=r"with self, tcp, cma has none.*RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY=1"
    ):
        TransferConnector(config, instance_id="D", compatibility_hash="c", host="127.0.0.1")


@pytest.mark.usefixtures("without_devices")
def test_rdma_without_a_device_is_refused_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capabilities, "find_components", lambda: ["tcp", "ib"])
    config = KVTransferConfig(role=KVRole.CONSUMER, rdma=True)
    with pytest.raises(
        ValueError, match=r"is empty: give the pods the resource of your RDMA device plugin"
    ):
        TransferConnector(config, instance_id="D", compatibility_hash="c", host="127.0.0.1")


def test_rdma_with_verbs_and_a_device_is_accepted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "mlx5_0").mkdir()
    monkeypatch.setattr(capabilities, "RDMA_DEVICES", tmp_path)
    monkeypatch.setattr(capabilities, "find_components", lambda: ["tcp", "ib"])
    capabilities.require_rdma()


def test_the_settings_of_the_cuda_image_load_a_ucx_with_verbs_that_moves_bytes(
    tmp_path: Path,
) -> None:
    """docker/engine-cuda.Dockerfile links NIXL's UCX and sets two variables."""
    if importlib.util.find_spec("nixl_cu12") is None:
        pytest.skip("nixl-cu12 is not installed: pip install 'baton[nixl]'")
    links = tmp_path / "ucx"
    subprocess.run(
        [sys.executable, ROOT / "docker/link_nixl_ucx.py", links], check=True, timeout=60
    )
    environment = os.environ | {
        "RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY": "1",
        "LD_LIBRARY_PATH": str(links),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [sys.executable, "-c", SWITCHED]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    description, moved, mapped = done.stdout.splitlines()
    assert "nixl_cu12" in description
    assert "ib" in description.rpartition("with ")[2].split(", ")
    assert moved == f"DONE True {{'ucx tcp/lo': {2**20}}}"
    assert "libuct_ib_mlx5" in mapped, "the module for current adapters is missing"
    assert "libucx/lib" not in mapped, "the wheel's UCX was also loaded"
