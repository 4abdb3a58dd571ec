"""Runs the forward of a step by a captured graph, by compiled pieces, or layer by layer.

A step uses the fastest of these ways that is prepared for the step's size.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from baton_engine.compilation.cudagraph_dispatcher import (
    BatchDescriptor,
    CudagraphDispatcher,
    CudagraphMode,
    Dispatch,
    GraphKind,
)
from baton_engine.compilation.graphs import CudaGraphs, GraphBackend, PieceGraphs
from baton_engine.compilation.piecewise import (
    NoCompiler,
    PieceCompiler,
    PiecewiseBackend,
    compile_model,
)
from baton_engine.models.forward_context import ForwardBatch, RunPiece, forward_context
from baton_engine.models.fused_layers import FusedModel
from baton_engine.models.layers import Model
from baton_engine.models.operators import SPLITTING
from baton_engine.worker.forward.compilation_plan import CompilationPlan
from baton_engine.worker.forward.static_inputs import StaticInputs

logger = logging.getLogger(__name__)
INT32_MAX = 2**31 - 1


def graph_backend(device: torch.device) -> GraphBackend | None:
    """Return the backend that captures graphs on a device. None: the device supports no graphs."""
    return CudaGraphs(device) if device.type == "cuda" else None


class ForwardRunner:
    """Runs forwards of one model.

    Call `prepare` when the KV cache is allocated, then call `run` for each step. Call `drop_graphs`
    before the weights or the KV cache move to another address.
    """

    def __init__(
        self,
        model: Model,
        plan: CompilationPlan,
        graph_backend: GraphBackend | None,
        fused: FusedModel | None = None,
    ) -> None:
        """Set up the compiler. Nothing is compiled or captured before `prepare`.

        Args:
            model: model with weights, on the device where it runs.
            plan: what to compile and capture.
            graph_backend: graph backend of the device. May be None if the plan has no graphs.
            fused: the model's forward as one fused operation. None: layers run one by one.
        """
        self.plan = plan
        self.model = model
        parameter = next(model.parameters())
        self.device, self.dtype = parameter.device, parameter.dtype
        self._forward: Callable[..., Tensor] = model if fused is None else fused
        self.compiler: PieceCompiler | None = None
        self.backend: PiecewiseBackend | None = None
        if plan.mode != "none":
            self._set_up_compiler(plan)
        self._dispatcher = CudagraphDispatcher(
            plan.cudagraph_mode, plan.capture_sizes, plan.max_num_seqs
        )
        self._graph_backend = graph_backend
        self._static: StaticInputs | None = None
        self._full: dict[BatchDescriptor, Callable[[], Tensor]] = {}
        self._pieces: dict[BatchDescriptor, PieceGraphs] = {}

    @property
    def num_graphs(self) -> int:
        return len(self._full) + len(self._pieces)

    def run(self, batch: ForwardBatch, hidden: Tensor | None = None) -> Tensor:
        """Run the model's forward for one step.

        Args:
            batch: the step's tokens.
            hidden: output of the previous pipeline stage. None on the first stage.

        Returns:
            The output of `Model.forward`, which is valid until the next call of `run`.
        """
        context, num_tokens = batch.context, len(batch.input_ids)
        if context.routed_experts is not None:  # only uncompiled layers record the experts
            return self._call(self.model, batch, hidden)
        _, descriptor = self._dispatcher.dispatch(num_tokens, len(context.seq_lens))
        if descriptor is not None and (replay := self._full.get(descriptor)) is not None:
            self._inputs.fill(descriptor, batch, hidden)
            return replay()[:num_tokens]
        if descriptor is not None and (pieces := self._pieces.get(descriptor)) is not None:
            padded = self._inputs.fill_tokens(descriptor.num_tokens, batch, hidden)
            context.run_piece = pieces
            return self._call(self._forward, padded, self._inputs.hidden_of(descriptor.num_tokens))[
                :num_tokens
            ]
        return self._call(self._forward, batch, hidden)

    @torch.inference_mode()
    def prepare(self, kv_cache: Tensor) -> None:
        """Compile the model and capture graphs, as planned. Nothing is written to the KV cache.

        If an explicitly configured compilation or capture fails, the error is raised. Otherwise, a
        failure is logged as a warning, and steps run without compiled pieces or graphs.
        """
        self.drop_graphs()
        self.compile(kv_cache)
        self._capture(self._dispatcher.graphs(), kv_cache)
        if self.num_graphs:
            logger.info("%d CUDA graphs captured (%s)", self.num_graphs, self._dispatcher.mode.name)

    @torch.inference_mode()
    def compile(self, kv_cache: Tensor) -> None:
        """Trace the model and compile its pieces. Do nothing if they are already compiled.

        Each of the plan's `compile_sizes` is also compiled separately.
        """
        if self.backend is None or self.backend.num_pieces:
            return
        self._forward = compile_model(self.model, self.backend)
        # The first call traces the model, and must have more than one token.
        size = max((2, *self.plan.compile_sizes, *self.plan.capture_sizes))
        if self._largest_step_numel() > INT32_MAX:
            # The compiler uses 32-bit indices if they suffice for the step that it traces. No guard
            # detects a later, larger step. So trace the largest step.
            size = max(size, self.plan.max_num_batched_tokens)
        inputs = self._new_inputs(size, 1)
        inputs.clear()
        try:
            for num_tokens in (size, *self.plan.compile_sizes):
                self._run_static(inputs, BatchDescriptor(num_tokens), kv_cache)
        except Exception:
            if self.plan.compilation_is_explicit:
                raise
            logger.warning(
                "torch.compile failed, so the model runs without it, more slowly", exc_info=True
            )
            self._forward, self.backend, self.compiler = self.model, None, None
            mode = self._dispatcher.mode
            if mode.has_pieces:
                mode = CudagraphMode.FULL_DECODE_ONLY
            self._dispatcher = CudagraphDispatcher(
                mode, self.plan.capture_sizes, self.plan.max_num_seqs
            )

    @torch.inference_mode()
    def estimate_graph_bytes(self, kv_cache: Tensor) -> int:
        """Return an estimate of the GPU memory that all graphs will take, in bytes.

        The two largest graphs of each `GraphKind` are captured, measured and dropped. Each other
        graph is assumed to take as much as the second largest of its kind. If graphs cannot be
        captured, the estimate is 0.
        """
        by_kind: dict[GraphKind, list[Dispatch]] = {}
        for each in self._dispatcher.graphs():
            by_kind.setdefault(each.kind, []).append(each)
        total, free = 0, self._free_bytes()
        for wanted in by_kind.values():
            for each, times in zip(wanted, (1, len(wanted) - 1), strict=False):
                self._capture([each], kv_cache)
                if not self.num_graphs:
                    return 0  # graphs cannot be captured; `_capture` has logged the reason
                before, free = free, self._free_bytes()
                total += times * max(0, before - free)
        self.drop_graphs()
        return total

    def drop_graphs(self) -> None:
        """Drop all graphs. `prepare` captures them again.

        Graphs contain the addresses of weights and KV cache.
        """
        self._full.clear()
        self._pieces.clear()
        self._static = None
        if self._graph_backend is not None:
            self._graph_backend.start_over()

    def _set_up_compiler(self, plan: CompilationPlan) -> None:
        if plan.mode == "eager":
            self.compiler = NoCompiler()
        else:  # the import takes more than a second
            from baton_engine.compilation.inductor import InductorCompiler

            self.compiler = InductorCompiler(plan.cache_dir)
        model, group = self.model, self.model.parallel.tensor
        config = (type(model).__qualname__, model.config, self.dtype, group.size, model.layer_ids)
        self.backend = PiecewiseBackend(
            self.compiler, SPLITTING, plan.compile_sizes, config, self.device
        )

    def _capture(self, wanted: list[Dispatch], kv_cache: Tensor) -> None:
        if not wanted:
            return
        try:
            self._capture_all(wanted, kv_cache)
        except Exception:
            self.drop_graphs()
            if self.plan.graphs_are_explicit:
                raise
            logger.warning(
                "CUDA graphs could not be captured, so steps run without them, more slowly",
                exc_info=True,
            )
            self._dispatcher = CudagraphDispatcher(CudagraphMode.NONE, (), self.plan.max_num_seqs)

    def _capture_all(self, wanted: list[Dispatch], kv_cache: Tensor) -> None:
        assert self._graph_backend is not None, "a plan without a GPU has no graphs"
        if self._static is None:
            most_seqs = max(1, self._dispatcher.max_padded_seqs)
            self._static = self._new_inputs(max(self._dispatcher.sizes), most_seqs)
        self._static.clear()
        with self._graph_backend.session():
            for kind, descriptor in wanted:
                assert descriptor is not None
                run = partial(self._run_static, self._inputs, descriptor, kv_cache)
                run()  # first-use allocations and compilations happen here
                if kind is GraphKind.FULL:
                    _, self._full[descriptor] = self._graph_backend.capture(run)
                else:
                    self._pieces[descriptor] = PieceGraphs(self._graph_backend)
                    run(self._pieces[descriptor])

    def _largest_step_numel(self) -> int:
        """Return the number of elements of the largest activation in the largest step."""
        weights = (weight for weight in self.model.layers.parameters() if weight.dim() == 2)
        return self.plan.max_num_batched_tokens * max(
            (weight.shape[0] for weight in weights), default=1
        )

    def _free_bytes(self) -> int:
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self.device)[0]

    def _run_static(
        self,
        inputs: StaticInputs,
        descriptor: BatchDescriptor,
        kv_cache: Tensor,
        run_piece: RunPiece | None = None,
    ) -> Tensor:
        batch = inputs.batch(descriptor, kv_cache)
        batch.context.run_piece = run_piece
        return self._call(self._forward, batch, inputs.hidden_of(descriptor.num_tokens))

    def _call(
        self, forward: Callable[..., Tensor], batch: ForwardBatch, hidden: Tensor | None
    ) -> Tensor:
        batch.context.tensor_group = self.model.parallel.tensor
        with forward_context(batch.context):
            return forward(batch.input_ids, batch.positions, hidden)

    @property
    def _inputs(self) -> StaticInputs:
        assert self._static is not None, "prepare() first"
        return self._static

    def _new_inputs(self, max_tokens: int, max_seqs: int) -> StaticInputs:
        hidden = None
        if not self.model.parallel.is_first_stage:
            hidden = torch.zeros(
                (max_tokens, self.model.config.hidden_size), dtype=self.dtype, device=self.device
            )
        return StaticInputs(max_tokens, max_seqs, self.plan.max_blocks_per_seq, self.device, hidden)
