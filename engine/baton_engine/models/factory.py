"""Builds one rank's part of a model and loads the weights of that part."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from pathlib import Path

import torch

from baton_engine.distributed.group import ParallelContext
from baton_engine.models import architectures
from baton_engine.models.checkpoint.checkpoint_config import CheckpointConfig
from baton_engine.models.checkpoint.loader import check_weights, read_slices, read_tensor_index
from baton_engine.models.checkpoint.pooling_config import GENERATES
from baton_engine.models.checkpoint.sharding import ALONE, WeightTargets
from baton_engine.models.errors import ConfigurationError, ModelInvalid
from baton_engine.models.layers import Model
from baton_engine.models.registry import MODEL_CLASSES


@functools.cache
def model_classes() -> dict[str, type[Model]]:
    """Import all files in `architectures` and return the model classes by architecture name."""
    for module in pkgutil.iter_modules(architectures.__path__):
        importlib.import_module(f"{architectures.__name__}.{module.name}")
    return dict(sorted(MODEL_CLASSES.items()))


def class_of(architecture: str) -> type[Model] | None:
    """Return the class of an architecture. None: the architecture is unknown.

    Some pooling architectures use the class of the generating architecture, with another output
    layer or none. For example, Qwen3Model and Qwen3ForSequenceClassification use Qwen3ForCausalLM.
    """
    classes = model_classes()
    for suffix in ("Model", "ForSequenceClassification"):
        if architecture not in classes:
            architecture = architecture.replace(suffix, GENERATES)
    return classes.get(architecture)


def make_model(config: CheckpointConfig, parallel: ParallelContext = ALONE) -> Model:
    """Build this rank's part of a model on the "meta" device, without memory for weights.

    Raises:
        ModelInvalid: the architecture is unknown.
        ConfigurationError: the model cannot be split over these ranks.
    """
    model_class = class_of(config.architecture)
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
) -> Model:
    """Build this rank's part of a model and load the weights of that part.

    Every rank checks the names and shapes of all tensors, but reads only the slices that it holds.

    Args:
        path: folder of the checkpoint, with safetensors files.
        config: the checkpoint's parsed config.json.
        dtype: data type of the weights in memory.
        device: device of the weights.
        parallel: this rank's tensor and pipeline groups.
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
    entries = read_tensor_index(path)
    prefix = whole.NAME_PREFIX
    if config.pooling is None or any(name.startswith(prefix) for name in entries):
        prefix = ""  # the names need no change

    def in_checkpoint(targets: WeightTargets) -> WeightTargets:
        return {name.removeprefix(prefix): target for name, target in targets.items()}

    shapes = {name: target.shape for name, target in in_checkpoint(whole.weight_targets()).items()}
    # Check the shapes before memory is allocated, because config.json may contain any sizes.
    ignored = [name.removeprefix(prefix) for name in whole.ignored_weights()]
    check_weights(path, entries, shapes, ignored=ignored)
    model = make_model(config, parallel)
    if expert_parallel:
        for _, layer in model.sparse_layers:
            layer.leave_out_experts()
    model = model.to(dtype)
    try:
        # The same as to_empty(), but without its import of SymPy for strides of meta tensors.
        model._apply(lambda each: torch.empty(each.shape, dtype=each.dtype, device=device))
    except RuntimeError as error:  # torch has no other type for a failed allocation on a CPU
        raise ConfigurationError(
            "InsufficientMemory", f"{path}: there is no memory for the weights: {error}"
        ) from error
    model.move_constants(device)
    read_slices(entries, in_checkpoint(model.weight_targets()), show_progress=show_progress)
    return model.eval()
