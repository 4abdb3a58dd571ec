"""Run forward passes without an engine, run ranks as threads, and edit checkpoints.

For the tests of models, layers and checkpoints.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from baton_engine.distributed.group import ParallelContext
from baton_engine.distributed.group_errors import GroupBrokenError
from baton_engine.models.checkpoint.checkpoint_config import load_checkpoint_config
from baton_engine.models.checkpoint.sharding import ALONE, shard
from baton_engine.models.errors import ModelInvalid
from baton_engine.models.factory import load_model
from baton_engine.models.forward_context import ForwardBatch, ForwardContext, forward_context
from baton_engine.models.layers import CausalLM

BLOCK_SIZE = 4
DEADLINE_S = 60.0
CPU = torch.device("cpu")
T = TypeVar("T")


def load(path: Path, parallel: ParallelContext = ALONE) -> CausalLM:
    return load_model(path, load_checkpoint_config(path), torch.float32, CPU, parallel)


def assert_invalid(path: Path, *parts: str) -> None:
    """Check that the load of the model is refused, with all these parts in the message."""
    with pytest.raises(ModelInvalid) as caught:
        load(path)
    assert caught.value.reason == "ModelInvalid"
    for part in parts:
        assert part in caught.value.message


def new_kv_cache(model: CausalLM, num_tokens: int, num_seqs: int) -> Tensor:
    """Return a KV cache for the rank's heads and layers. All slots are NaN until written."""
    own = shard(model.config, model.parallel)
    num_blocks = num_seqs * -(-num_tokens // BLOCK_SIZE)
    return torch.full(
        (num_blocks, own.num_kv_heads, own.num_layers, 2, BLOCK_SIZE, model.config.head_dim),
        float("nan"),
    )


def chunk_batch(sequences: list[list[int]], start: int, end: int, kv_cache: Tensor) -> ForwardBatch:
    """Return a batch of the tokens [start, end) of each sequence. All sequences are equally long.

    Sequence s of n owns the blocks s, s + n, s + 2n, ...
    """
    num_seqs, size = len(sequences), end - start
    tables = torch.arange(kv_cache.shape[0], dtype=torch.int32).view(-1, num_seqs).T.contiguous()
    positions = torch.arange(start, end)
    slots = tables[:, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
    context = ForwardContext(
        slot_mapping=slots.flatten(),
        block_tables=tables,
        cu_seqlens_q=torch.arange(num_seqs + 1, dtype=torch.int32) * size,
        seq_lens=torch.full((num_seqs,), end, dtype=torch.int32),
        kv_cache=kv_cache,
        max_seqlen_q=size,
    )
    input_ids = torch.tensor([sequence[start:end] for sequence in sequences]).flatten()
    return ForwardBatch(input_ids, positions.repeat(num_seqs), context)


@torch.inference_mode()
def run_model(
    model: CausalLM,
    sequences: list[list[int]],
    chunk: int,
    forward: Callable[..., Tensor] | None = None,
) -> Tensor:
    """Return the logits of every position, [num_seqs, num_tokens, vocab_size].

    Each forward pass takes `chunk` tokens of each sequence. A pipeline stage receives its input
    from the previous stage and sends its output to the next. Only the last stage returns logits.

    `forward` runs instead of the model's own forward.
    """
    forward = forward or model
    num_tokens = len(sequences[0])
    kv_cache = new_kv_cache(model, num_tokens, len(sequences))
    pipeline = model.parallel.pipeline
    logits: list[Tensor] = []
    for start in range(0, num_tokens, chunk):
        end = min(start + chunk, num_tokens)
        batch = chunk_batch(sequences, start, end, kv_cache)
        hidden = None
        if not model.parallel.is_first_stage:
            hidden = pipeline.recv(
                torch.empty(len(batch.input_ids), model.config.hidden_size), pipeline.rank - 1
            )
        batch.context.tensor_group = model.parallel.tensor
        with forward_context(batch.context):
            hidden = forward(batch.input_ids, batch.positions, hidden)
        if model.parallel.is_last_stage:
            logits.append(model.compute_logits(hidden).view(len(sequences), end - start, -1))
        else:
            pipeline.send(hidden, pipeline.rank + 1)
    return torch.cat(logits, dim=1) if logits else torch.empty(0)


def edit_config(path: Path, **changes: Any) -> None:
    """Change fields of a checkpoint's config.json; None removes a field."""
    config = json.loads((path / "config.json").read_text())
    for name, value in changes.items():
        if value is None:
            config.pop(name, None)
        else:
            config[name] = value
    (path / "config.json").write_text(json.dumps(config))


def with_biases(path: Path) -> Path:
    """Add biases to every projection of a llama checkpoint."""
    edit_config(path, attention_bias=True, mlp_bias=True)
    weights = load_file(path / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name, weight in list(weights.items()):
        if name.endswith("_proj.weight"):
            weights[name.replace("weight", "bias")] = torch.randn(len(weight), generator=generator)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


@dataclass
class Meeting:
    """The shared state of the threads of one group."""

    size: int
    barrier: threading.Barrier = field(init=False)
    tensors: list[Tensor] = field(init=False)
    mail: dict[tuple[int, int], queue.Queue[Tensor]] = field(init=False)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.size, timeout=DEADLINE_S)
        self.tensors = [torch.empty(0)] * self.size
        self.mail = {(s, t): queue.Queue() for s in range(self.size) for t in range(self.size)}


class ThreadGroup:
    """A `Group` whose members are threads. `calls` counts the operations by name."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting, self.rank, self.size = meeting, rank, meeting.size
        self.calls: dict[str, int] = {}

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor.copy_(torch.stack(self._exchange("all_reduce", tensor)).sum(dim=0))

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        return torch.cat(self._exchange("all_gather", tensor), dim=dim)

    def all_to_all(
        self, rows: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int]
    ) -> Tensor:
        assert sum(send_counts) == len(rows)
        width = torch.tensor([*send_counts, rows.shape[1:].numel()])
        numbers = self._exchange("all_to_all", width)
        assert all(row[-1] == width[-1] for row in numbers), "ranks send rows of different sizes"
        assert [int(row[self.rank]) for row in numbers] == list(recv_counts)
        sent = self._exchange("all_to_all", rows)
        return torch.cat(
            [r.split(n[:-1].tolist())[self.rank] for r, n in zip(sent, numbers, strict=True)]
        )

    def send(self, tensor: Tensor, target: int) -> None:
        self._meeting.mail[self.rank, target].put(tensor.clone())

    def recv(self, tensor: Tensor, source: int) -> Tensor:
        waited_until = time.monotonic() + DEADLINE_S
        while time.monotonic() < waited_until:
            if self._meeting.barrier.broken:
                break
            with contextlib.suppress(queue.Empty):
                return tensor.copy_(self._meeting.mail[source, self.rank].get(timeout=0.01))
        raise GroupBrokenError(f"rank {source} sent nothing")

    def abort(self) -> None:
        self._meeting.barrier.abort()

    def close(self) -> None:
        pass

    def _exchange(self, name: str, tensor: Tensor) -> list[Tensor]:
        self.calls[name] = self.calls.get(name, 0) + 1
        self._meeting.tensors[self.rank] = tensor.clone()
        try:
            self._meeting.barrier.wait()
            tensors = list(self._meeting.tensors)
            self._meeting.barrier.wait()
        except threading.BrokenBarrierError as error:
            raise GroupBrokenError(f"rank {self.rank} is alone") from error
        return tensors


def run_threads(
    works: Sequence[Callable[[], T]], on_error: Callable[[], None] = lambda: None
) -> list[T]:
    """Run each of `works` in a thread and return the results.

    Args:
        on_error: called after a failure, to end the waits of the other threads.

    Raises:
        BaseException: the first failure.
    """
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(index: int) -> None:
        try:
            results[index] = works[index]()
        except BaseException as error:
            errors.append(error)
            on_error()

    threads = [
        threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(works))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), (
        f"ranks did not end within {DEADLINE_S} s"
    )
    return [results[index] for index in range(len(works))]


def run_ranks(
    work: Callable[[ParallelContext], T], tensor_size: int = 1, pipeline_size: int = 1
) -> list[T]:
    """Run `work` on every rank, each in a thread; return the results in global rank order."""
    tensor_groups = [Meeting(tensor_size) for _ in range(pipeline_size)]
    pipelines = [Meeting(pipeline_size) for _ in range(tensor_size)]

    def run(stage: int, rank: int) -> T:
        return work(
            ParallelContext(
                ThreadGroup(tensor_groups[stage], rank) if tensor_size > 1 else ALONE.tensor,
                ThreadGroup(pipelines[rank], stage) if pipeline_size > 1 else ALONE.pipeline,
            )
        )

    def abort() -> None:
        for meeting in (*tensor_groups, *pipelines):
            meeting.barrier.abort()

    ranks = itertools.product(range(pipeline_size), range(tensor_size))
    return run_threads([functools.partial(run, *rank) for rank in ranks], abort)
