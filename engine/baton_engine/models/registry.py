"""Which class serves which architecture, and how a model is made from a checkpoint folder."""

from __future__ import annotations

from pathlib import Path

import torch

from baton_engine.models.config import CheckpointConfig
from baton_engine.models.errors import ModelInvalid
from baton_engine.models.layers import CausalLM
from baton_engine.models.llama import LlamaForCausalLM
from baton_engine.models.loader import load_weights
from baton_engine.models.qwen3 import Qwen3ForCausalLM
from baton_engine.models.qwen3_moe import Qwen3MoeForCausalLM

MODELS: dict[str, type[CausalLM]] = {
    "LlamaForCausalLM": LlamaForCausalLM,
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
    "Qwen3MoeForCausalLM": Qwen3MoeForCausalLM,
}


def load_model(path: Path, config: CheckpointConfig, dtype: torch.dtype, device: torch.device) -> CausalLM:
    """Builds the model of `config` and fills it from the safetensors files in `path`.

    Raises:
        ModelInvalid: if the architecture is unknown or a tensor is missing, unexpected, truncated or misshapen.
    """
    model_class = MODELS.get(config.architecture)
    if model_class is None:
        raise ModelInvalid(f"{path}: architecture {config.architecture} is not supported; known: {', '.join(MODELS)}")
    with torch.device("meta"):
        model = model_class(config)
    # The rotary frequencies are computed, not loaded; they need real memory.
    model.rotary_embedding = type(model.rotary_embedding)(config)
    model = model.to(dtype).to_empty(device=device)
    load_weights(path, model.weight_targets(), model.ignored_weights())
    return model.eval()
