"""Graph passes remove operators without effect, and keep the result."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from baton_engine.compilation.passes import RemoveNoOps


@pytest.mark.parametrize(
    ("function", "left"),
    [
        (lambda x: x.view(-1, 2, 4).view(-1, 8) + 1, 1),
        (lambda x: x[:, 0:8] * 2, 1),
        (lambda x: x[:, 1:8] * 2, 2),
        (lambda x: x.view(-1, 4).view(-1, 2) + 1, 2),
    ],
    ids=["view of a view", "slice of all", "slice of some", "views that change the shape"],
)
def test_operators_that_do_not_change_their_input_are_removed(
    function: Callable[[Tensor], Tensor], left: int
) -> None:
    x = torch.randn(6, 8)
    traced = make_fx(function, tracing_mode="symbolic")(x)
    RemoveNoOps()(traced.graph)
    traced.recompile()
    torch.testing.assert_close(traced(x), function(x))
    kept = [
        node
        for node in traced.graph.nodes
        if node.op == "call_function" and "sym_size" not in str(node.target)
    ]
    assert len(kept) == left, traced.code


@pytest.mark.parametrize(("middle", "left"), [(torch.float32, 1), (torch.bfloat16, 3)])
def test_a_conversion_and_its_inverse_are_removed_if_they_are_exact(
    middle: torch.dtype, left: int
) -> None:
    start = torch.float16
    convert = torch.ops.prims.convert_element_type.default
    x = torch.randn(5, 3).to(start)
    traced = make_fx(lambda x: convert(convert(x, middle), start) + 1, tracing_mode="symbolic")(x)
    expected = traced(x)
    RemoveNoOps()(traced.graph)
    traced.recompile()
    assert torch.equal(traced(x), expected)
    assert sum(node.op == "call_function" for node in traced.graph.nodes) == left
