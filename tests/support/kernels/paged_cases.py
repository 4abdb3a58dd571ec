"""Paged KV caches for tests: the engine's layout, shuffled blocks, and NaN in unwritten slots.

For the tests of kernels on the KV cache.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass, field

import torch
from torch import Tensor

from baton_kernels.attention import (
    AttentionPlan,
    Implementation,
    paged_attention,
    plan_attention,
)
from baton_kernels.launch_configurations import Configuration
from support.kernels.launch_constants import launch_constants

# (query length, total length) per sequence
DECODE = [(1, 1), (1, 17), (1, 16), (1, 63)]
PREFILL = [(1, 1), (7, 7), (33, 33)]
MIXED = [(1, 40), (5, 37), (1, 1), (19, 19), (16, 48), (1, 65)]
HEADS = [(4, 4, 16), (8, 2, 32), (6, 2, 24), (5, 1, 40)]  # (query heads, KV heads, head_dim)

# With block size 16: one token, less than a block, a block, more, a tile of the kernel, and longer
# than all but two sequences.
WINDOWS = [1, 5, 16, 37, 64, 200]
LONG = [(1, 40), (5, 37), (1, 1), (19, 19), (16, 48), (1, 300), (70, 131), (1, 65), (40, 230)]

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def dtypes() -> list[torch.dtype]:
    """Return the dtypes to test. bfloat16 is included only with a GPU.

    Triton's interpreter computes different results in bfloat16.
    """
    return [torch.float32, torch.float16] + ([torch.bfloat16] if torch.cuda.is_available() else [])


@dataclass
class PagedCase:
    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_tables: Tensor
    cu_seqlens_q: Tensor
    seq_lens: Tensor
    scale: float
    window: int | None = None
    soft_cap: float | None = None
    #: Keyword arguments of paged_attention: key_scale, value_scale.
    options: dict[str, Tensor] = field(default_factory=dict)

    def to(self, device: str) -> PagedCase:
        # The whole allocation moves, so that views keep their strides.
        kv_cache = self.key_cache._base
        moved = kv_cache.to(device)
        key_cache, value_cache = layer_views(moved, layer=1)
        tensors = [t.to(device) for t in (self.block_tables, self.cu_seqlens_q, self.seq_lens)]
        options = {name: scale.to(device) for name, scale in self.options.items()}
        return PagedCase(
            self.query.to(device),
            key_cache,
            value_cache,
            *tensors,
            self.scale,
            self.window,
            self.soft_cap,
            options,
        )

    def arguments(
        self, max_seqlen_q: int | None = None, implementation: Implementation | None = None
    ) -> tuple[Tensor, Tensor, Tensor, AttentionPlan, float]:
        """Return the arguments of paged_attention, with a new plan."""
        plan = plan_attention(
            self.query,
            self.key_cache,
            self.block_tables,
            self.cu_seqlens_q,
            self.seq_lens,
            self.window,
            max_seqlen_q,
            self.soft_cap,
            implementation,
        )
        return self.query, self.key_cache, self.value_cache, plan, self.scale


def layer_views(kv_cache: Tensor, layer: int) -> tuple[Tensor, Tensor]:
    """Return strided views of a layer's keys and values.

    Args:
        kv_cache: [num_blocks, num_kv_heads, num_layers, 2, block_size, head_dim].
        layer: index of the layer.
    """
    return kv_cache[:, :, layer, 0], kv_cache[:, :, layer, 1]


def paged_case(
    lengths: list[tuple[int, int]],
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    share_first_block: bool = False,
    window: int | None = None,
    soft_cap: float | None = None,
    fp8: bool = False,
) -> PagedCase:
    """Return inputs of paged attention. Unwritten slots are NaN, and unused block ids are invalid.

    Args:
        lengths: (query length, total length) of each sequence.
        fp8: the caches are float8_e4m3fn, with a scale per KV head for keys and for values.
    """
    blocks_of = [-(-total // block_size) for _, total in lengths]
    num_blocks = sum(blocks_of) + 3
    kv_cache = torch.full((num_blocks, num_kv_heads, 3, 2, block_size, head_dim), float("nan"))
    free = torch.randperm(num_blocks).tolist()
    block_tables = torch.full((len(lengths), max(blocks_of) + 1), 2**30, dtype=torch.int32)
    for seq, (_, total) in enumerate(lengths):
        for index in range(blocks_of[seq]):
            shared = share_first_block and index == 0 and seq > 0
            block = int(block_tables[0, 0]) if shared else free.pop()
            block_tables[seq, index] = block
            filled = min(block_size, total - index * block_size)
            if not shared:
                kv_cache[block, :, 1, :, :filled] = torch.randn(num_kv_heads, 2, filled, head_dim)
    query_lengths = torch.tensor([0] + [q for q, _ in lengths])
    key_cache, value_cache = layer_views(
        kv_cache.to(torch.float8_e4m3fn if fp8 else dtype), layer=1
    )
    options: dict[str, Tensor] = {}
    if fp8:
        options["key_scale"], options["value_scale"] = torch.rand(2, num_kv_heads) + 0.5
    return PagedCase(
        query=torch.randn(int(query_lengths.sum()), num_heads, head_dim).to(dtype),
        key_cache=key_cache,
        value_cache=value_cache,
        block_tables=block_tables,
        cu_seqlens_q=query_lengths.cumsum(0).int(),
        seq_lens=torch.tensor([total for _, total in lengths], dtype=torch.int32),
        scale=head_dim**-0.5,
        window=window,
        soft_cap=soft_cap,
        options=options,
    )


def large_memory(num_elements: int, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """Return a tensor of `num_elements`. On the CPU, pages need no memory until they are used."""
    if device != "cpu":
        return torch.empty(num_elements, dtype=dtype, device=device)
    no_reserve = 0x4000  # MAP_NORESERVE of Linux
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    return torch.frombuffer(mmap.mmap(-1, num_elements * dtype.itemsize, flags=flags), dtype=dtype)


def assert_attends(actual: Tensor, case: PagedCase) -> None:
    arguments = case.arguments(implementation="reference")
    expected = paged_attention(*arguments, **case.options)
    assert not expected.isnan().any(), "the case itself is broken"
    tolerance = TOLERANCE[case.query.dtype]
    torch.testing.assert_close(actual.cpu(), expected.cpu(), atol=tolerance, rtol=tolerance)


def poison_what_no_query_sees(case: PagedCase) -> None:
    """Write NaN to the KV of all tokens that are outside of the window of every query."""
    block_size = case.key_cache.shape[2]
    for seq, seq_len in enumerate(case.seq_lens.tolist()):
        num_queries = int(case.cu_seqlens_q[seq + 1] - case.cu_seqlens_q[seq])
        for position in range(max(0, seq_len - num_queries - case.window + 1)):
            block = case.block_tables[seq, position // block_size]
            case.key_cache[block, :, position % block_size] = float("nan")
            case.value_cache[block, :, position % block_size] = float("nan")


def triton_output(
    case: PagedCase,
    device: str,
    max_seqlen_q: int | None = None,
    config: Configuration | None = None,
) -> Tensor:
    """Return the output of the Triton kernel. The kernel writes into a tensor of NaN.

    Args:
        config: overrides single constants of the default configuration.
    """
    moved = case.to(device)
    poisoned = torch.full_like(moved.query, float("nan"))
    with launch_constants(config):
        arguments = moved.arguments(max_seqlen_q, "triton")
    return paged_attention(*arguments, **moved.options, out=poisoned)
