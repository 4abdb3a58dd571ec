"""The launches to tune, with shapes that represent the shape classes of every operation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib import import_module

import torch
from measure import Call, Setting, WrongResultError, check
from paged_batch import BLOCK_SIZE, NUM_HEADS, NUM_KV_HEADS, Paged, random_cache
from parts import moe
from torch import Tensor

from baton_kernels.launch_configurations import Configuration
from tuning.selection import Subject

Make = Callable[[], Subject]
EPS = 1e-6


def _attention(setting: Setting) -> list[Make]:
    """Return functions that make the decode and prefill subjects.

    Few long sequences and many short sequences have the same shape class, so one subject has both.
    """
    decode = (
        [([1] * 3, [70] * 3)]
        if setting.quick
        else [([1] * 8, [16384] * 8), ([1] * 128, [1024] * 128)]
    )
    prefill = (
        [([20, 9], [20, 40])] if setting.quick else [([8192], [8192]), ([2048, 2048], [2048, 6144])]
    )
    head_dims = (32,) if setting.quick else (128, 64)
    return [
        partial(_attend, setting, points, head_dim)
        for head_dim in head_dims
        for points in (decode, prefill)
    ]


def _attend(setting: Setting, points: list[tuple[list[int], list[int]]], head_dim: int) -> Subject:

    num_layers = 2 if setting.quick else 8
    num_tokens = max(
        sum(-(-length // BLOCK_SIZE) * BLOCK_SIZE for length in lengths) for _, lengths in points
    )
    cache = random_cache(num_tokens, num_layers, setting.dtype, setting.device, head_dim)
    batches = [Paged(cache, *point) for point in points]

    def attend(batch: Paged, layer: int) -> Tensor:
        # A plan per call, because it has the configuration that is being tried.
        return batch.attend(layer, batch.new_plan("triton"))

    def expected(batch: Paged) -> Tensor:
        rows = [torch.tensor([n - 1], device=setting.device) for n in batch.query_lens]
        return torch.cat([batch.expected(0, seq, row) for seq, row in enumerate(rows[:4])])

    truths = [expected(batch) for batch in batches]

    def correct() -> None:
        for batch, truth in zip(batches, truths, strict=True):
            ends = batch.cu_seqlens_q[1 : len(truth) + 1].long() - 1
            check("attention", attend(batch, 0)[ends], truth)

    calls = [partial(attend, batch, layer) for batch in batches for layer in range(num_layers)]
    return _subject(setting, "attention", calls, correct)


def _moe(setting: Setting) -> list[Make]:
    counts = [1, 5] if setting.quick else [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096]
    sizes = (
        (64, 32, 8, 2)
        if setting.quick
        else (moe.HIDDEN, moe.INTERMEDIATE, moe.NUM_EXPERTS, moe.TOP_K)
    )
    layers: list[moe.Layer] = []  # shared, made by the first subject
    experts = [partial(_experts, setting, layers, num_tokens, sizes) for num_tokens in counts]
    return [partial(_routing, setting, sizes[2], sizes[3]), *experts]


def _routing(setting: Setting, num_experts: int, top_k: int) -> Subject:
    from baton_kernels.moe.reference import route_top_k_reference
    from baton_kernels.moe.triton_kernel import route_top_k_triton

    # Without ties, whose order depends on the device.
    logits = torch.randn(64, num_experts, device=setting.device)
    truth = route_top_k_reference(logits, top_k, True)[0]

    def correct() -> None:
        check("routing", route_top_k_triton(logits, top_k, True)[0], truth)

    return _subject(setting, "moe", [partial(route_top_k_triton, logits, top_k, True)], correct)


def _experts(
    setting: Setting, layers: list[moe.Layer], num_tokens: int, sizes: tuple[int, int, int, int]
) -> Subject:
    from baton_kernels.moe.triton_kernel import run_experts_triton

    hidden, intermediate, num_experts, top_k = sizes
    if not layers:
        layers += [moe.make_layer(setting, hidden, intermediate, num_experts) for _ in range(2)]
    work = [
        (layer, moe.route(setting, num_tokens, hidden, num_experts, top_k))
        for _ in range(1 if num_tokens > moe.MOST_OF_GOAL else 4)
        for layer in layers
    ]
    truth = moe.expected(*work[0])

    def run(layer: moe.Layer, tokens: moe.Routed) -> Tensor:
        return run_experts_triton(
            tokens.x, layer.gate_up, layer.down, tokens.weights, tokens.expert_ids
        )

    def worthwhile(candidate: Configuration) -> bool:
        """Return whether the candidate's tile height is near the number of tokens per expert."""
        rows = candidate.get("BLOCK_M")
        if rows is None:
            return True
        return (
            num_tokens <= 32
            if rows == 1
            else num_tokens <= 512
            if rows <= 32
            else num_tokens >= 128
        )

    return _subject(
        setting,
        "moe",
        [partial(run, *one) for one in work],
        lambda: check("experts", run(*work[0]), truth),
        worthwhile,
    )


def _elementwise(setting: Setting, operation: str) -> list[Make]:
    counts = [3] if setting.quick else [64, 8192]
    return [partial(_rows_of, setting, operation, num_tokens) for num_tokens in counts]


def _rows_of(setting: Setting, operation: str, num_tokens: int) -> Subject:
    """Return a subject of norm, rope or activation, with the sizes of an 8B model."""
    hidden, intermediate, head_dim = (64, 96, 32) if setting.quick else (4096, 14336, 128)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=setting.device).to(setting.dtype)

    launch: Callable[..., object]
    reference: Callable[..., object]
    if operation == "norm":
        from baton_kernels.norm.reference import add_rms_norm_reference
        from baton_kernels.norm.triton_kernel import add_rms_norm_triton

        weight = random(hidden)
        launch = lambda x, y: add_rms_norm_triton(x, y, weight, EPS)  # noqa: E731
        reference = lambda x, y: add_rms_norm_reference(x, y, weight, EPS)  # noqa: E731
        make = lambda: (random(num_tokens, hidden), random(num_tokens, hidden))  # noqa: E731
    elif operation == "rope":
        from baton_kernels.rope.reference import rotate_qk_reference
        from baton_kernels.rope.triton_kernel import rotate_qk_triton

        angles = [torch.rand(num_tokens, head_dim // 2, device=setting.device) for _ in range(2)]
        heads = (NUM_HEADS, NUM_KV_HEADS)
        launch = lambda qkv: rotate_qk_triton(qkv, *heads, *angles, None, None, 0.0)  # noqa: E731
        reference = lambda qkv: rotate_qk_reference(qkv, *heads, *angles, None, None, 0.0)  # noqa: E731
        make = lambda: (random(num_tokens, (NUM_HEADS + 2 * NUM_KV_HEADS) * head_dim),)  # noqa: E731
    else:
        from baton_kernels.activation.reference import silu_and_mul_reference
        from baton_kernels.activation.triton_kernel import silu_and_mul_triton

        launch, reference = silu_and_mul_triton, silu_and_mul_reference
        make = lambda: (random(num_tokens, 2 * intermediate),)  # noqa: E731

    first = make()
    truth = _tensors(reference(*first))
    sets = [
        first,
        *(make() for _ in range(setting.rotations(sum(tensor.nbytes for tensor in first), 32) - 1)),
    ]

    def correct() -> None:
        for got, expected in zip(_tensors(launch(*first)), truth, strict=True):
            check(operation, got, expected)

    return _subject(setting, operation, [partial(launch, *one) for one in sets], correct)


def _kv_write(setting: Setting) -> list[Make]:
    return [
        partial(_write, setting, num_tokens)
        for num_tokens in ([5] if setting.quick else [64, 8192])
    ]


def _write(setting: Setting, num_tokens: int) -> Subject:
    from baton_kernels.kv_write.triton_kernel import write_kv_triton

    num_layers = 2 if setting.quick else 16
    cache = random_cache(2 * num_tokens + BLOCK_SIZE, num_layers, setting.dtype, setting.device)
    slots = torch.randperm(len(cache) * BLOCK_SIZE, device=setting.device)[:num_tokens]
    shape = (2, num_tokens, NUM_KV_HEADS, cache.shape[-1])
    new = [torch.randn(shape, device=setting.device).to(setting.dtype) for _ in range(num_layers)]

    def write(layer: int) -> None:
        write_kv_triton(*new[layer], cache[:, :, layer, 0], cache[:, :, layer, 1], slots)

    def correct() -> None:
        cache[:, :, 0].fill_(torch.nan)
        write(0)
        # [num_tokens, num_kv_heads, 2, head_dim]
        written = cache[slots // BLOCK_SIZE, :, 0, :, slots % BLOCK_SIZE]
        check("KV write", written, new[0].permute(1, 2, 0, 3), 0)

    return _subject(
        setting, "kv_write", [partial(write, layer) for layer in range(num_layers)], correct
    )


def _block_copy(setting: Setting) -> list[Make]:
    return [partial(_copy, setting, 3 if setting.quick else 64)]


def _copy(setting: Setting, count: int) -> Subject:
    from baton_kernels.block_copy import copy_blocks
    from baton_kernels.block_copy.triton_kernel import copy_blocks_triton

    cache = random_cache(
        4 * count * BLOCK_SIZE, 2 if setting.quick else 32, setting.dtype, setting.device
    )
    ids = torch.randperm(len(cache))[: 2 * count]
    pairs = ids.view(2, count).T.contiguous()
    # No pair writes a block that another reads.
    chains = [[(source, target)] for source, target in pairs.tolist()]

    def copy() -> None:
        copy_blocks_triton(cache, cache, chains) if cache.device.type == "cpu" else copy_blocks(
            cache, pairs
        )

    def correct() -> None:
        target = pairs[:, 1].to(cache.device)
        cache[target] = torch.nan
        copy()
        check("block copy", cache[target], cache[pairs[:, 0].to(cache.device)], 0)

    # No graph: the pairs come from the host.
    return _subject(setting, "block_copy", [copy], correct, graph=False)


def _block_checksum(setting: Setting) -> list[Make]:
    return [partial(_checksum, setting, 3 if setting.quick else 256)]


def _checksum(setting: Setting, count: int) -> Subject:
    from baton_kernels.block_checksum.reference import word_sums_reference
    from baton_kernels.block_checksum.triton_kernel import block_sums_triton

    cache = random_cache(
        2 * count * BLOCK_SIZE, 2 if setting.quick else 32, setting.dtype, setting.device
    )
    ids, num_heads = torch.randperm(len(cache))[:count], cache.shape[1]

    def correct() -> None:
        few = ids[:3]
        expected = word_sums_reference(
            cache.cpu()[few].flatten(1).view(torch.uint8).view(torch.int64)
        )
        check("block checksum", block_sums_triton(cache, few, 0, num_heads).cpu(), expected, 0)

    call = partial(block_sums_triton, cache, ids, 0, num_heads)
    # No graph: the block ids come from the host.
    return _subject(setting, "block_checksum", [call], correct, graph=False)


def _sampling(setting: Setting) -> list[Make]:
    return [partial(_draw, setting, num_rows) for num_rows in ([2] if setting.quick else [8, 128])]


def _draw(setting: Setting, num_rows: int) -> Subject:
    from parts import sampling

    from baton_kernels.sampling.reference import draw_tokens_reference
    from baton_kernels.sampling.triton_kernel import draw_tokens_triton

    vocab_size = 300 if setting.quick else sampling.VOCAB_SIZE
    sets = [
        3 * torch.randn(num_rows, vocab_size, device=setting.device)
        for _ in range(2 if setting.quick else 4)
    ]
    kinds = [sampling.Filters(top_k=50, top_p=0.9), sampling.Filters(top_p=0.9), sampling.Filters()]
    params = [kinds[row % len(kinds)] for row in range(num_rows)]
    keys = list(range(num_rows))
    truth = draw_tokens_reference(sets[0][:6].cpu(), params[:6], keys[:6])

    def correct() -> None:
        if not torch.equal(draw_tokens_triton(sets[0], params, keys)[:6].cpu(), truth):
            raise WrongResultError("sampling: other tokens than the reference's")

    calls = [partial(draw_tokens_triton, logits, params, keys) for logits in sets]
    return _subject(setting, "sampling", calls, correct, graph=False)


def _subject(
    setting: Setting,
    operation: str,
    calls: Sequence[Call],
    checked: Callable[[], object],
    worthwhile: Callable[[Configuration], bool] = lambda candidate: True,
    *,
    graph: bool = True,
) -> Subject:
    """Return a subject that times `calls`.

    Args:
        setting: device and options of the run.
        operation: name of the kernel's folder.
        calls: the launches to time.
        checked: runs a launch, and raises WrongResultError if the result is wrong.
        worthwhile: returns whether to try a candidate.
        graph: whether to capture the calls into a CUDA graph.
    """

    def correct() -> bool:
        try:
            checked()
        except WrongResultError:
            return False
        return True

    def call() -> None:  # one of each shape: the configurations it requests are tuned
        for one in {calls[0], calls[-1]}:
            one()

    def candidates(name: str, shape_class: str) -> Iterable[Configuration]:
        return [one for one in _candidates(name, shape_class) if worthwhile(one)]

    return Subject(
        operation, call, correct, lambda: setting.seconds(calls, graph=graph), candidates
    )


def _candidates(operation: str, shape_class: str) -> Sequence[Configuration]:
    """Return the candidates of the kernel to which `shape_class` belongs."""
    from baton_kernels.attention.triton_plan import DECODE_CANDIDATES, PREFILL_CANDIDATES
    from baton_kernels.moe.routing_triton import ROUTING_CANDIDATES

    of_kernel: dict[str, list[Configuration]] = {
        "decode": DECODE_CANDIDATES,
        "prefill": PREFILL_CANDIDATES,
        "routing": ROUTING_CANDIDATES,
    }
    kind = shape_class.split("/")[0]
    if kind in of_kernel:
        return of_kernel[kind]
    candidates: list[Configuration] = import_module(
        f"baton_kernels.{operation}.triton_kernel"
    ).CANDIDATES
    return candidates


def _tensors(result: object) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else tuple(result)  # type: ignore[arg-type]


OPERATIONS: dict[str, Callable[[Setting], list[Make]]] = {
    "attention": _attention,
    "moe": _moe,
    "norm": partial(_elementwise, operation="norm"),
    "rope": partial(_elementwise, operation="rope"),
    "activation": partial(_elementwise, operation="activation"),
    "kv_write": _kv_write,
    "block_copy": _block_copy,
    "block_checksum": _block_checksum,
    "sampling": _sampling,
}
