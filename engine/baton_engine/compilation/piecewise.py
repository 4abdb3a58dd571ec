"""The torch.compile backend, which cuts the traced graph at attention.

The backend compiles each piece between two attentions for any number of tokens, and again for each
number of tokens in `compile_sizes`. The forward context may run pieces as captured graphs.
"""

from __future__ import annotations

import logging
import time
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, fx, nn
from torch.fx.passes.split_module import split_module

from baton_engine.compilation.cache_key import environment_key, traced_source_files
from baton_engine.models.forward_context import current_context

logger = logging.getLogger(__name__)
Compiled = Callable[..., Any]
#: Operators at which a graph is cut, and the function that replaces each of them.
SplittingOperators = Mapping[Any, Callable[..., Any]]


class PieceCompiler(Protocol):
    def open(self, key: str) -> None:
        """Prepare to compile the pieces of one model.

        Args:
            key: the model's `environment_key`.
        """

    def compile(
        self, graph: fx.GraphModule, arguments: Sequence[Any], size: int | None
    ) -> Compiled:
        """Return a function that computes the graph.

        Args:
            graph: piece to compile.
            arguments: arguments of the current call of the piece. If `size` is None: example
                arguments from the trace.
            size: the only number of tokens that the function must support. None: any number.
        """


class NoCompiler:
    """Runs pieces uncompiled, operator by operator."""

    def open(self, key: str) -> None:
        pass

    def compile(
        self, graph: fx.GraphModule, arguments: Sequence[Any], size: int | None
    ) -> Compiled:
        return graph.forward


class Piece(nn.Module):
    """A compiled piece of the model: the part of the graph between two attention operators.

    The arguments of `forward` are weights, inputs of the model, results of earlier pieces or
    attention operators, and the number of tokens.
    """

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
        if compiled is None:  # happens during warm-up, which runs all sizes once
            compiled = self._by_size[size] = self._compiler.compile(self._graph, args, size)
        return compiled


class PiecewiseBackend:
    """The backend of one torch.compile call.

    Attributes:
        num_pieces: number of pieces that the model was cut into. 0 before the trace.

    Args:
        compiler: compiles the pieces.
        splitting: operators at which the graph is cut.
        compile_sizes: for each of these numbers of tokens, pieces are also compiled separately.
        config: values that the traced code depends on. The disk cache's key contains them.
        device: device of the model.
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
        self.num_pieces = 0

    def __call__(self, graph: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        if self.num_pieces:  # a second trace would treat this step's sizes as constants
            raise RuntimeError(
                "torch traces the model again, because an option of torch changed after the engine "
                "started; set torch's options before the engine is created"
            )
        started = time.monotonic()
        self._compiler.open(environment_key(traced_source_files(graph), self._config, self._device))
        whole = split_at(graph, self._splitting)
        for name, part in list(whole.named_children()):
            assert isinstance(part, fx.GraphModule)
            if not _call_functions_directly(part, self._splitting) and any(
                node.op not in ("placeholder", "output") for node in part.graph.nodes
            ):
                setattr(
                    whole, name, Piece(self.num_pieces, part, self._compiler, self._compile_sizes)
                )
                self.num_pieces += 1
        took = time.monotonic() - started
        logger.info(
            "the traced model was cut into %d pieces, which were prepared in %.1f s",
            self.num_pieces,
            took,
        )
        return whole.forward


def split_at(graph: fx.GraphModule, operators: SplittingOperators) -> fx.GraphModule:
    """Split a graph into submodules in the order of execution, and return the graph of submodules.

    Each call of one of `operators` becomes a submodule, and so does each piece between two calls.
    """
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
    """Return the model's forward, compiled for any number of tokens.

    The number of tokens is dimension 0 of each tensor argument. The first call traces the model.
    Later calls check no guards. Only the values of tensors and the number of tokens may change.
    Everything else that the traced code reads must stay the same.

    Raises:
        ValueError: the first call has fewer than 2 tokens. torch would compile only for that
            number.
    """

    def forward(*args: Tensor | None) -> Tensor:
        return model(*args)

    # torch keeps compiled code with the code object, so each model of the process needs its own.
    code = forward.__code__.replace()
    own = types.FunctionType(code, forward.__globals__, forward.__name__, None, forward.__closure__)
    compiled = torch.compile(
        own, backend=backend, fullgraph=True, options={"guard_filter_fn": _keep_no_guards}
    )
    traced = False

    def run(*args: Tensor | None) -> Tensor:
        nonlocal traced
        if not traced:
            _mark_number_of_tokens(args)
        result: Tensor = compiled(*args)
        traced = True
        return result

    return run


def _mark_number_of_tokens(args: Sequence[Tensor | None]) -> None:
    for tensor in args:
        if tensor is not None:
            if len(tensor) < 2:
                raise ValueError(f"a model is traced with at least 2 tokens, not {len(tensor)}")
            torch._dynamo.mark_dynamic(tensor, 0)


def _keep_no_guards(guards: Sequence[Any]) -> list[bool]:
    return [False] * len(guards)


def _overload(target: Any) -> Any:
    """Return an operator's default overload. Return any other target unchanged.

    Graphs of Dynamo contain both operators and overloads.
    """
    return target.default if isinstance(target, torch._ops.OpOverloadPacket) else target


def _call_functions_directly(part: fx.GraphModule, operators: SplittingOperators) -> bool:
    """Replace each call of an operator in `operators` by a call of the operator's function.

    Returns:
        Whether any call was replaced.
    """
    found = False
    for node in part.graph.nodes:
        if node.op == "call_function" and _overload(node.target) in operators:
            node.target = operators[_overload(node.target)]
            found = True
    if found:
        part.recompile()
    return found


def _where_size_is(examples: Sequence[Any]) -> tuple[int, int | None] | None:
    """Find the argument or the dimension of an argument that is the number of tokens.

    Returns:
        (index of the argument, dimension). The dimension is None if the argument itself is the
        number of tokens. The result is None if nothing is found.
    """
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
    """Return whether a size is a plain symbol such as `s0`, and not a number or an expression."""
    return isinstance(size, torch.SymInt) and bool(size.node.expr.is_symbol)
