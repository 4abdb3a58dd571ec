"""The weights of one rank, from loading to release, and the runner of their forward."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from baton_engine.models.factory import load_model
from baton_engine.models.fused_layers import fuse_layers
from baton_engine.models.layers import Model
from baton_engine.worker.forward.compilation_plan import plan_compilation
from baton_engine.worker.forward.forward_runner import ForwardRunner, graph_backend
from baton_engine.worker.model_spec import ModelSpec
from baton_engine.worker.packed_weights import pack_weights, quantize_weights

if TYPE_CHECKING:  # an engine without expert parallelism never imports worker.experts
    from baton_engine.worker.experts.expert_steps import ExpertSteps
    from baton_engine.worker.experts.expert_weights import ExpertStore


class LoadedModel:
    """One rank's model on its device, and the `ForwardRunner` that runs it.

    The model is absent before `load`, and from `drop` until `restore`. With a GPU, the model is
    also absent from `move_to_host` until `restore`.
    """

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        #: Set if the model is expert-parallel.
        self.expert_steps: ExpertSteps | None = None
        self._forward: ForwardRunner | None = None
        self._is_on_host = False

    @property
    def is_absent(self) -> bool:
        return self._forward is None or self._is_on_host

    @property
    def forward(self) -> ForwardRunner:
        if self._forward is None or self._is_on_host:
            raise RuntimeError(
                "the model has no weights: call load_model() first, or wake_up() after sleep()"
            )
        return self._forward

    @property
    def model(self) -> Model:
        return self.forward.model

    def load(self) -> None:
        """Read this rank's weights, and quantize, pack and fuse them as configured.

        Raises:
            ModelInvalid: a file or tensor is wrong. The message names the file or tensor.
            ConfigurationError: the model cannot be split over the configured ranks.
        """
        spec, config, parallel = self.spec, self.spec.config, self.spec.parallel
        is_expert_parallel = config.parallel.enable_expert_parallel
        is_first_rank = parallel.is_first_stage and parallel.tensor.rank == 0
        model = load_model(
            spec.path,
            spec.model_config,
            spec.dtype,
            spec.device,
            parallel,
            expert_parallel=is_expert_parallel,
            show_progress=is_first_rank and sys.stderr.isatty(),
        )
        if is_expert_parallel:
            from baton_engine.worker.experts.expert_steps import ExpertSteps

            self.expert_steps = ExpertSteps(model, parallel.tensor, spec.device)
        backend = graph_backend(spec.device)
        plan = plan_compilation(
            config, spec.model_config, spec.max_model_len, has_graphs=backend is not None
        )
        if (quantization := config.model.quantization) is not None:
            quantize_weights(model, quantization)
        elif plan.mode == "none":  # a packed weight cannot be traced
            pack_weights(model)
        # The fused operation includes attention. Compiled models cannot use it, because they are
        # cut at attention.
        fused = fuse_layers(model) if plan.mode == "none" else None
        self._forward = ForwardRunner(model, plan, backend, fused)

    def expert_store(self) -> ExpertStore:
        """Return a new store, which reads single experts of the expert-parallel model."""
        from baton_engine.worker.experts.expert_weights import ExpertStore, expert_form

        spec, model = self.spec, self.model
        device = next(model.parameters()).device
        form = expert_form(spec.config.model.quantization, spec.dtype, device)
        return ExpertStore(spec.path, model, spec.dtype, device, form)

    def drop_graphs(self) -> None:
        """Drop captured graphs, which contain the addresses of weights and KV cache."""
        if self._forward is not None:
            self._forward.drop_graphs()

    def move_to_host(self) -> None:
        """Move the weights of a GPU to host memory. On a CPU, do nothing."""
        if self.spec.device.type != "cpu" and self._forward is not None:
            self._is_on_host = True  # before the move, which may fail
            self._forward.model.to("cpu")

    def drop(self) -> None:
        """Drop the weights, on the device or in host memory."""
        self._forward, self._is_on_host = None, False

    def restore(self) -> None:
        """Move the weights back from host memory, or load dropped weights again.

        Raises:
            ModelInvalid: the checkpoint can no longer be read.
        """
        if self._forward is None:
            self.spec.forget_hashes()  # the checkpoint's files may have changed
            self.load()
        elif self._is_on_host:
            self._forward.model.to(self.spec.device)
            self._is_on_host = False
