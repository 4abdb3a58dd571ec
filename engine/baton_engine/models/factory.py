"""Makes models: finds the class of an architecture, builds this rank's part and fills it with weights."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from pathlib import Path

import torch

from baton_engine.distributed.group import ParallelContext
from baton_engine.models import architectures
from baton_engine.models.checkpoint_config import CheckpointConfig
from baton_engine.models.errors import ModelInvalid
from baton_engine.models.layers import CausalLM
from baton_engine.models.loader import load_weights
from baton_engine.models.registry import MODEL_CLASSES
from baton_engine.models.sharding import ALONE


@functools.cache
def model_classes() -> dict[str, type[CausalLM]]:
    """By architecture, as in config.json; from all files in `architectures`."""
    for module in pkgutil.iter_modules(architectures.__path__):
        importlib.import_module(f"{architectures.__name__}.{module.name}")
    return dict(sorted(MODEL_CLASSES.items()))


def make_model(config: CheckpointConfig, parallel: ParallelContext = ALONE) -> CausalLM:
    """The model of `config`, this rank's part, without memory for weights (on the "meta" device).

    Raises:
        ModelInvalid: if the architecture is unknown.
        ConfigurationError: if the model cannot be split so.
    """
    model_class = model_classes().get(config.architecture)
    if model_class is None:
        known = ", ".join(model_classes())
        raise ModelInvalid(f"architecture {config.architecture} is not supported; known: {known}")
    with torch.device("meta"):
        return model_class(config, parallel)


def load_model(
    path: Path,
    config: CheckpointConfig,
    dtype: torch.dtype,
    device: torch.device,
    parallel: ParallelContext = ALONE,
    *,
    expert_parallel: bool = False,
    show_progress: bool = False,
) -> CausalLM:
    """Builds this rank's part of the model of `config` and fills it from the safetensors files in `path`.

    Every rank checks the whole checkpoint's names and shapes, and reads its own slices only.

    Args:
        expert_parallel: sparse layers are left without experts, for a shard of them to come; see `SparseMoE`.
        show_progress: a bar of the bytes read, on stderr.

    Raises:
        ModelInvalid: if the architecture is unknown or a tensor is missing, unexpected, truncated or misshapen.
        ConfigurationError: if the model cannot be split so.
    """
    model = make_model(config, parallel)
    if expert_parallel:
        for _, layer in model.sparse_layers:
            layer.leave_out_experts()
    model = model.to(dtype).to_empty(device=device)
    model.rotary_embedding.move_to(device)
    whole = {name: target.shape for name, target in make_model(config).weight_targets().items()}
    load_weights(
        path,
        model.weight_targets(),
        whole,
        ignored=model.ignored_weights(),
        show_progress=show_progress,
    )
    return model.eval()
