"""A graph pass that removes no-ops from a piece, the graph between two attentions.

Inductor runs this pass after torch's own passes and before code generation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

aten, prims = torch.ops.aten, torch.ops.prims
_VIEWS = {aten.view.default, aten.reshape.default, aten._unsafe_view.default}
_WIDENINGS = {
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
    (torch.float32, torch.float64),
    (torch.bfloat16, torch.float64),
    (torch.float16, torch.float64),
}


class RemoveNoOps(CustomGraphPass):
    """Replaces a node with an earlier node that has the same value.

    Three kinds of nodes are replaced: views, slices and conversions that equal their input, views
    of views that equal the original tensor, and exact conversions to a wider type and back. If
    another node reads the wider tensor, the conversion to the wider type stays.
    """

    def __call__(self, graph: fx.Graph) -> None:
        for node in list(graph.nodes):
            source = _same_as(node)
            if source is not None:
                node.replace_all_uses_with(source)
                graph.erase_node(node)
        graph.eliminate_dead_code()
        graph.lint()

    def uuid(self) -> Any:
        return get_hash_for_files((__file__,))


def _same_as(node: fx.Node) -> fx.Node | None:
    """Return an earlier node with the same value, or None.

    If the node is a view of a view, make it a view of the original tensor.
    """
    if node.op != "call_function" or not isinstance(node.args[0] if node.args else None, fx.Node):
        return None
    source = node.args[0]
    assert isinstance(source, fx.Node)
    if node.target in _VIEWS:
        if source.target in _VIEWS:
            source = source.args[0]
            assert isinstance(source, fx.Node)
            node.update_arg(0, source)
        return source if _alike(node, source) else None
    if node.target is aten.slice.Tensor:
        return source if _alike(node, source) else None
    if node.target is prims.convert_element_type.default:
        value, wide = _value(node), _value(source)
        if (
            source.target is prims.convert_element_type.default
            and value is not None
            and wide is not None
        ):
            narrow = source.args[0]
            assert isinstance(narrow, fx.Node)
            if (value.dtype, wide.dtype) in _WIDENINGS and _alike(node, narrow):
                return narrow
        return source if _alike(node, source) else None
    return None


def _value(node: fx.Node) -> Tensor | None:
    value = node.meta.get("val")
    return value if isinstance(value, Tensor) else None


def _alike(a: fx.Node, b: fx.Node) -> bool:
    """Return whether two nodes have the same dtype, shape and strides.

    Dynamic sizes are the same only if they are equal for all values.
    """
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    x, y = _value(a), _value(b)
    if x is None or y is None or x.dtype != y.dtype or x.dim() != y.dim():
        return False
    sizes = zip((*x.shape, *x.stride()), (*y.shape, *y.stride()), strict=True)
    return all(statically_known_true(left == right) for left, right in sizes)
