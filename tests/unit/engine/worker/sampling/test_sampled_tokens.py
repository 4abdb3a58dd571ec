"""The copy of sampled tokens from a GPU to the host, with stand-ins for torch.cuda."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import pytest
import torch

from baton_engine.worker.sampling.sampled_tokens import SampledTokens
from support.engine.fake_gpu import GPUTensor


def test_tokens_in_host_memory_need_no_copy() -> None:
    token_ids = torch.tensor([4, 2])
    tokens = SampledTokens(token_ids, torch.tensor([False, True]))
    assert tokens.wait().ctypes.data == token_ids.data_ptr()
    assert tokens.impossible_rows() == [1]
    assert SampledTokens(token_ids, None).impossible_rows() == []


def test_a_copy_from_a_gpu_is_queued_in_pinned_memory_and_ends_with_its_event(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []
    empty, copy = torch.empty, torch.Tensor.copy_

    def allocate(*shape: Any, pin_memory: bool, **options: Any) -> torch.Tensor:
        assert pin_memory, "the host would wait for a copy to other memory"
        return empty(*shape, **options)

    def copy_(target: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> torch.Tensor:
        assert non_blocking
        calls.append("copy")
        return copy(target, source.as_subclass(torch.Tensor))

    class Event:
        def record(self, stream: str) -> None:
            calls.append(f"record in {stream}")

        def synchronize(self) -> None:
            calls.append("synchronize")

    @contextmanager
    def select(device: torch.device) -> Any:
        calls.append(f"select {device}")
        yield

    monkeypatch.setattr(torch, "empty", allocate)
    monkeypatch.setattr(torch.Tensor, "copy_", copy_)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    monkeypatch.setattr(torch.cuda, "device", select)
    tokens = SampledTokens(
        torch.tensor([4, 2]).as_subclass(GPUTensor),
        torch.tensor([True, False]).as_subclass(GPUTensor),
    )
    assert calls == ["copy", "copy", "record in stream of cpu"]
    assert tokens.impossible_rows() == [0]
    assert tokens.wait().tolist() == [4, 2]
    assert calls[3:] == ["select cpu", "synchronize"] * 2
