"""`benchmarks/kernels/costs.py` counts the bytes and operations that the docstrings state."""

from __future__ import annotations

import importlib
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

COSTS: dict[str, Any] = runpy.run_path(
    str(Path(__file__).parents[4] / "benchmarks" / "kernels" / "costs.py")
)
OPERATIONS = [
    "activation",
    "attention",
    "block_checksum",
    "block_copy",
    "kv_write",
    "linear",
    "moe",
    "norm",
    "rope",
    "sampling",
]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_operation_states_its_cost(operation: str) -> None:
    described = importlib.import_module(f"baton_kernels.{operation}").__doc__ or ""
    assert "Counted cost (`benchmarks/kernels/costs.py`):\n\n    bytes       " in described


def test_attention_counts_each_key_and_value_once() -> None:
    """Two sequences with blocks of 16 tokens: one query sees 20 keys, two see 6 and 7."""
    query, key_cache = torch.empty(3, 4, 8), torch.empty(9, 2, 16, 8)
    cost = COSTS["attention"](query, key_cache, [1, 2], [20, 7], None)
    assert cost.nbytes == 2 * 27 * 2 * 8 * 4 + 2 * 3 * 4 * 8 * 4 + 3 * 4
    assert cost.flops == 4 * 4 * 8 * (20 + 6 + 7)


def test_attention_counts_the_keys_of_a_window() -> None:
    """With a window of 4, one query sees keys 16 to 19, two see keys 2 to 5 and 3 to 6."""
    query, key_cache = torch.empty(3, 4, 8), torch.empty(9, 2, 16, 8)
    cost = COSTS["attention"](query, key_cache, [1, 2], [20, 7], 4)
    assert cost.nbytes == 2 * (4 + 5) * 2 * 8 * 4 + 2 * 3 * 4 * 8 * 4 + 2 * 4
    assert cost.flops == 4 * 4 * 8 * (4 + 4 + 4)


def test_linear_counts_the_weight_once() -> None:
    cost = COSTS["linear"](torch.empty(2, 3, 8), torch.empty(5, 8), torch.empty(5))
    assert cost.nbytes == (6 * 8 + 5 * 8 + 5 + 6 * 5) * 4
    assert cost.flops == 2 * 6 * 8 * 5


def test_experts_count_the_weights_of_chosen_experts_once() -> None:
    gate_up, down = torch.empty(5, 2 * 3, 8), torch.empty(5, 8, 3)
    cost = COSTS["experts"](torch.empty(2, 8), gate_up, down, torch.tensor([[0, 4], [4, 1]]))
    assert cost.nbytes == 3 * (3 * 3 * 8) * 4 + 2 * 2 * 8 * 4
    assert cost.flops == 6 * 4 * 8 * 3
