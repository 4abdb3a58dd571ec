"""The backend of torch.compile: cuts the traced graph at attention, and compiles what lies between.

A piece runs compiled, for any number of tokens or for the one at hand if that is among `compile_sizes`; how, the forward context
says: it may hold captured graphs of the pieces.
"""

from __future__ import annotations

import logging
import time
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.passes.split_module import split_module

from baton_engine.compilation.cache_key import environment_key, traced_source_files
from baton_engine.compilation.inductor import Compiled, PieceCompiler
from baton_engine.models.dynamic_dims import mark_dynamic
from baton_engine.models.forward_context import current_context

logger = logging.getLogger(__name__)
SplittingOperators = Mapping[Any, Callable[..., Any]]
"""Operators at which a graph is cut, and the function that runs in place of each."""


class Piece(nn.Module):
    """What lies between two attentions: a function of weights, tensors of earlier pieces and the number of tokens."""

    def __init__(
        self,
        index: int,
        graph: fx.GraphModule,
        compiler: PieceCompiler,
        compile_sizes: Sequence[int],
    ) -> None:
        super().__init__()
        self.index = index
        self._graph = graph
        self._compiler = compiler
        examples = [
            node.meta.get("example_value") for node in graph.graph.nodes if node.op == "placeholder"
        ]
        self._size_at = _where_size_is(examples)
        self._compiled = compiler.compile(graph, examples, None)
        self._by_size: dict[int, Compiled | None] = dict.fromkeys(
            compile_sizes if self._size_at is not None else ()
        )

    def forward(self, *args: Any) -> Any:
        run_piece = current_context().run_piece
        compiled = self._compiled if not self._by_size else self._for_size(args)
        return compiled(*args) if run_piece is None else run_piece(self.index, compiled, args)

    def _for_size(self, args: tuple[Any, ...]) -> Compiled:
        assert self._size_at is not None
        place, dim = self._size_at
        size = args[place] if dim is None else args[place].shape[dim]
        if size not in self._by_size:
            return self._compiled
        compiled = self._by_size[size]
        if compiled is None:  # while warming up, which runs all sizes once
            compiled = self._by_size[size] = self._compiler.compile(self._graph, args, size)
        return compiled


class PiecewiseBackend:
    """A backend for one torch.compile. After the trace, `num_pieces` and `num_cuts` say what became of the graph.

    Args:
        compile_sizes: numbers of tokens for which pieces are compiled once more.
        config: what else decides what the traced code does, for the key of the disk cache.
    """

    def __init__(
        self,
        compiler: PieceCompiler,
        splitting: SplittingOperators,
        compile_sizes: Sequence[int],
        config: Sequence[object],
        device: torch.device,
    ) -> None:
        self._compiler, self._splitting, self._compile_sizes = compiler, splitting, compile_sizes
        self._config, self._device = config, device
        self.num_pieces = self.num_cuts = 0

    def __call__(self, graph: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        if self.num_pieces:  # of whatever sizes the step has that torch sees now, and no guard keeps later ones from it
            raise RuntimeError(
                "torch traces the model again, for a setting of its own changed after the engine had started"
            )
        started = time.monotonic()
        self._compiler.open(environment_key(traced_source_files(graph), self._config, self._device))
        whole = split_at(graph, self._splitting)
        for name, part in list(whole.named_children()):
            assert isinstance(part, fx.GraphModule)
            if _call_functions_directly(part, self._splitting):
                self.num_cuts += 1
            elif any(node.op not in ("placeholder", "output") for node in part.graph.nodes):
                setattr(
                    whole, name, Piece(self.num_pieces, part, self._compiler, self._compile_sizes)
                )
                self.num_pieces += 1
        took = time.monotonic() - started
        logger.info(
            "the model is traced and cut into %d pieces, which took %.1f s", self.num_pieces, took
        )
        return whole.forward


def split_at(graph: fx.GraphModule, operators: SplittingOperators) -> fx.GraphModule:
    """A graph of submodules in the order of `graph`: each of the operators alone in one, and what lies between together."""
    part_of: dict[fx.Node, int] = {}
    part = 0
    for node in graph.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        cuts = node.op == "call_function" and _overload(node.target) in operators
        part_of[node] = part + cuts
        part += 2 * cuts
    return split_module(graph, graph, part_of.__getitem__, keep_original_order=True)


def compile_model(model: nn.Module, backend: PiecewiseBackend) -> Callable[..., Tensor]:
    """The model's forward, traced at the first call and compiled for all sizes of its dynamic dimensions.

    The first call has at least two of each; see `support_torch_compile`. Nothing is checked at later calls: the caller promises
    the same kinds of arguments, and that nothing changes that the traced code reads, except tensors' values and those dimensions.
    """

    def forward(*args: Tensor | None) -> Tensor:
        return model(*args)

    # torch keeps what it compiled with the code object, which other models of this process must not share.
    code = forward.__code__.replace()
    own = types.FunctionType(code, forward.__globals__, forward.__name__, None, forward.__closure__)
    names = list(_forward_arguments(model))
    compiled = torch.compile(
        own, backend=backend, fullgraph=True, options={"guard_filter_fn": _keep_no_guards}
    )
    traced = False

    def run(*args: Tensor | None) -> Tensor:
        nonlocal traced
        if not traced:
            mark_dynamic(model, dict(zip(names, args, strict=False)))
        result: Tensor = compiled(*args)
        traced = True
        return result

    return run


def _forward_arguments(model: nn.Module) -> Sequence[str]:
    code = type(model).forward.__code__
    return code.co_varnames[1 : code.co_argcount]


def _keep_no_guards(guards: Sequence[Any]) -> list[bool]:
    return [False] * len(guards)


def _overload(target: Any) -> Any:
    """Dynamo leaves either an operator or one of its overloads in a graph."""
    return target.default if isinstance(target, torch._ops.OpOverloadPacket) else target


def _call_functions_directly(part: fx.GraphModule, operators: SplittingOperators) -> bool:
    """Puts the functions in place of their operators, and says whether there were any."""
    found = False
    for node in part.graph.nodes:
        if node.op == "call_function" and _overload(node.target) in operators:
            node.target = operators[_overload(node.target)]
            found = True
    if found:
        part.recompile()
    return found


def _where_size_is(examples: Sequence[Any]) -> tuple[int, int | None] | None:
    """(argument, dimension of it or None if it is the number itself) that tells the number of tokens; None: none does."""
    for place, example in enumerate(examples):
        if _is_symbol(example):
            return place, None
    for place, example in enumerate(examples):
        if isinstance(example, Tensor):
            for dim, size in enumerate(example.shape):
                if _is_symbol(size):
                    return place, dim
    return None


def _is_symbol(size: Any) -> bool:
    """Rather than a number, or a multiple of a symbol."""
    return isinstance(size, torch.SymInt) and bool(size.node.expr.is_symbol)
