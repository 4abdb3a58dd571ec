"""Builds one rank's part of a model and loads the weights of that part."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from pathlib import Path

import torch

from baton_engine.distributed.group import ParallelContext
from baton_engine.models import architectures
from baton_engine.models.checkpoint_config import CheckpointConfig
from baton_engine.models.errors import ConfigurationError, ModelInvalid
from baton_engine.models.layers import CausalLM
from baton_engine.models.loader import check_weights, read_slices
from baton_engine.models.registry import MODEL_CLASSES
from baton_engine.models.sharding import ALONE


@functools.cache
def model_classes() -> dict[str, type[CausalLM]]:
    """Import all files in `architectures` and return the model classes by architecture name."""
    for module in pkgutil.iter_modules(architectures.__path__):
        importlib.import_module(f"{architectures.__name__}.{module.name}")
    return dict(sorted(MODEL_CLASSES.items()))


def make_model(config: CheckpointConfig, parallel: ParallelContext = ALONE) -> CausalLM:
    """Build this rank's part of a model on the "meta" device, without memory for weights.

    Raises:
        ModelInvalid: the architecture is unknown.
        ConfigurationError: the model cannot be split over these ranks.
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
    """Build this rank's part of a model and load the weights of that part.

    Every rank checks the names and shapes of all tensors, but reads only the slices that it holds.

    Args:
        path: folder of the checkpoint, with safetensors files.
        config: the checkpoint's parsed config.json.
        dtype: data type of the weights in memory.
        device: device of the weights.
        parallel: this rank's groups.
        expert_parallel: whether to leave sparse layers without experts. Each layer needs an
            `ExpertShard` later.
        show_progress: whether to show a progress bar of the bytes read on stderr.

    Raises:
        ModelInvalid: the architecture is unknown, or a tensor is missing, unexpected, truncated or
            misshapen.
        ConfigurationError: the model cannot be split over these ranks, or there is no memory for
            its weights.
    """
    whole = make_model(config)
    shapes = {name: target.shape for name, target in whole.weight_targets().items()}
    # Before memory is allocated: the shapes that config.json demands may be of any size.
    entries = check_weights(path, shapes, ignored=whole.ignored_weights())
    model = make_model(config, parallel)
    if expert_parallel:
        for _, layer in model.sparse_layers:
            layer.leave_out_experts()
    model = model.to(dtype)
    try:
        # Like to_empty(), which imports SymPy to copy the strides of meta tensors.
        model._apply(lambda each: torch.empty(each.shape, dtype=each.dtype, device=device))
    except RuntimeError as error:  # torch has no other type for a failed allocation on a CPU
        raise ConfigurationError(
            "InsufficientMemory", f"{path}: there is no memory for the weights: {error}"
        ) from error
    model.rotary_embedding.move_to(device)
    read_slices(entries, model.weight_targets(), show_progress=show_progress)
    return model.eval()
