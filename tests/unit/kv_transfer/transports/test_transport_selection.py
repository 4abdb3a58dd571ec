"""The transports that a setting stands for."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton_kv_transfer.transports.transport_selection import LOADERS, choose_transports


@pytest.mark.parametrize(
    ("devices", "kinds"),
    [
        ([], ["shm", "tcp"]),
        (["/dev/nvidiactl"], ["shm", "tcp", "ucx"]),
        (["/sys/class/infiniband/mlx5_0"], ["shm", "ucx", "tcp"]),
        (["/sys/class/infiniband/mlx5_0", "/dev/nvidiactl"], ["shm", "ucx", "tcp"]),
    ],
)
def test_auto_prefers_ucx_to_tcp_only_with_rdma_and_needs_a_gpu_without(
    monkeypatch: pytest.MonkeyPatch, devices: list[str], kinds: list[str]
) -> None:
    monkeypatch.setattr(Path, "exists", lambda path: str(path) in devices)
    monkeypatch.setattr(
        Path, "glob", lambda path, _: [each for each in devices if each.startswith(str(path))]
    )
    assert list(choose_transports("auto")) == kinds


@pytest.mark.parametrize("kind", ["shm", "tcp", "ucx"])
def test_a_named_transport_is_the_only_one(kind: str) -> None:
    assert choose_transports(kind) == {kind: LOADERS[kind]()}


def test_an_unknown_transport_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"no transport 'rdma'; there are auto, nixl, .*shm.*tcp"):
        choose_transports("rdma")
