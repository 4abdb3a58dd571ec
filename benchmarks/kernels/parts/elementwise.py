"""Measures RMSNorm, rotary embedding and SiLU-mul.

Copy bandwidth is the limit, because each token is read once. On a CPU, the process keeps freed
memory, as an engine does, and page faults are counted.
"""

from __future__ import annotations

import resource
from collections.abc import Callable
from dataclasses import dataclass

import costs
import torch
from measure import Call, Result, Setting, best_peer, check, gb_s, us
from torch import Tensor
from torch.nn.functional import rms_norm as torch_rms_norm
from torch.nn.functional import silu

from baton_engine.worker.memory.freed_memory import keep_freed_memory
from baton_engine.worker.memory.host_memory import available_host_memory

HIDDEN, INTERMEDIATE, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4096, 14336, 32, 8, 128
TOKENS = [1, 64, 8192]
TOKENS_ON_CPU = [1, 64, 1024]
EPS = 1e-6

Operation = Callable[..., Tensor | tuple[Tensor, ...]]


@dataclass
class Subject:
    name: str
    ours: Operation
    reference: Operation
    peers: dict[str, Operation]
    make: Callable[[int], tuple[Tensor, ...]]  #: Makes arguments for a number of tokens.
    #: Counts the cost from arguments and results.
    cost: Callable[[tuple[Tensor, ...], tuple[Tensor, ...]], costs.Cost]


def run(setting: Setting) -> Result:
    sizes = [3] if setting.quick else TOKENS if setting.is_gpu else TOKENS_ON_CPU
    if not setting.is_gpu:
        keep_freed_memory(available_host_memory())
    return [
        _row(setting, one, num_tokens) for num_tokens in sizes for one in _subjects(setting)
    ], []


def _page_faults(subject: Subject, num_tokens: int) -> int:
    """Return the median number of page faults of a call after the first."""
    arguments = subject.make(num_tokens)
    faults = []
    for _ in range(6):
        start = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        subject.ours(*arguments)
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - start)
    return sorted(faults[1:])[2]


def _row(setting: Setting, subject: Subject, num_tokens: int) -> dict[str, object]:
    arguments = subject.make(num_tokens)
    got, expected = (
        _results(operation(*arguments)) for operation in (subject.ours, subject.reference)
    )
    for one, other in zip(got, expected, strict=True):
        check(f"{subject.name} of {num_tokens} tokens", one, other)
    nbytes = subject.cost(arguments, got).nbytes
    sets = [arguments, *(subject.make(num_tokens) for _ in range(setting.rotations(nbytes) - 1))]
    seconds = setting.seconds(_calls(subject.ours, sets))
    peers = {name: _calls(operation, sets) for name, operation in subject.peers.items()}
    if setting.is_gpu:
        peers["torch.compile"] = _calls(torch.compile(subject.reference, dynamic=False), sets)
    peer, peer_seconds, _ = best_peer(setting, peers)
    row: dict[str, object] = {
        "part": "elementwise",
        "operation": subject.name,
        "tokens": num_tokens,
        "us": us(seconds),
        "GB/s": gb_s(nbytes, seconds),
        "of copy": round(nbytes / seconds / setting.copy_bandwidth, 3),
        "best peer": peer,
        "against it": round(peer_seconds / seconds, 2),
    }
    if not setting.is_gpu:
        row["page faults"] = _page_faults(subject, num_tokens)
    return row


def _calls(operation: Operation, sets: list[tuple[Tensor, ...]]) -> list[Call]:
    return [lambda one=one: operation(*one) for one in sets]


def _results(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else result


def _subjects(setting: Setting) -> list[Subject]:
    from baton_kernels.activation import silu_and_mul
    from baton_kernels.activation.reference import silu_and_mul_reference
    from baton_kernels.norm import add_rms_norm, rms_norm
    from baton_kernels.norm.reference import add_rms_norm_reference, rms_norm_reference
    from baton_kernels.rope import rotary_angles, rotate_qk
    from baton_kernels.rope.reference import rotate_qk_reference

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=setting.device).to(setting.dtype)

    weight, head_weight = random(HIDDEN), random(HEAD_DIM)
    frequencies = 10000.0 ** -(torch.arange(0, HEAD_DIM, 2, device=setting.device) / HEAD_DIM)

    def qkv(num_tokens: int) -> tuple[Tensor, ...]:
        positions = torch.randint(0, 8192, (num_tokens,), device=setting.device)
        return (
            random(num_tokens, (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM),
            *rotary_angles(positions, frequencies),
        )

    def rotated(arguments: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> costs.Cost:
        return costs.rope(arguments[1:], results)

    def torch_add_norm(x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
        total = x + residual
        return torch_rms_norm(total, (HIDDEN,), weight, EPS), total

    def torch_silu_mul(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return silu(gate) * up

    heads, norms = (NUM_HEADS, NUM_KV_HEADS), (head_weight, head_weight, EPS)
    return [
        Subject(
            "RMSNorm",
            lambda x: rms_norm(x, weight, EPS),
            lambda x: rms_norm_reference(x, weight, EPS),
            {"torch rms_norm": lambda x: torch_rms_norm(x, (HIDDEN,), weight, EPS)},
            lambda num_tokens: (random(num_tokens, HIDDEN),),
            costs.elementwise,
        ),
        Subject(
            "add, RMSNorm",
            lambda x, residual: add_rms_norm(x, residual, weight, EPS),
            lambda x, residual: add_rms_norm_reference(x, residual, weight, EPS),
            {"torch add, rms_norm": torch_add_norm},
            lambda num_tokens: (random(num_tokens, HIDDEN), random(num_tokens, HIDDEN)),
            costs.elementwise,
        ),
        Subject(
            "RoPE",
            lambda x, cos, sin: rotate_qk(x, *heads, cos, sin),
            lambda x, cos, sin: rotate_qk_reference(x, *heads, cos, sin, None, None, 0.0),
            {
                "torch": lambda x, cos, sin: rotate_qk_reference(
                    x, *heads, cos, sin, None, None, 0.0
                )
            },
            qkv,
            rotated,
        ),
        Subject(
            "QK norm, RoPE",
            lambda x, cos, sin: rotate_qk(x, *heads, cos, sin, *norms),
            lambda x, cos, sin: rotate_qk_reference(x, *heads, cos, sin, *norms),
            {"torch": lambda x, cos, sin: rotate_qk_reference(x, *heads, cos, sin, *norms)},
            qkv,
            rotated,
        ),
        Subject(
            "SiLU-mul",
            silu_and_mul,
            silu_and_mul_reference,
            {"torch": torch_silu_mul},
            lambda num_tokens: (random(num_tokens, 2 * INTERMEDIATE),),
            costs.elementwise,
        ),
    ]
