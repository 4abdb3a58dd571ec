"""Decides whether a checkpoint generates or pools, and how it pools, from its files.

A checkpoint of `sentence-transformers` has modules.json: the model, its pooling, and perhaps a
normalization. Other checkpoints have the default pooling of their architecture.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton_engine.models.errors import ModelInvalid
from baton_protocol.checkpoint_files import parse_json, read_file, read_json
from baton_protocol.pooling_params import Task
from baton_text.tokenizer import Tokenizer

MODULES_FILE = "modules.json"
#: End of the names of architectures with an output layer.
GENERATES = "ForCausalLM"
#: End of the names of classifiers.
CLASSIFIES = "ForSequenceClassification"


class PoolingType(enum.StrEnum):
    """The hidden states that give a prompt's vector: the last, the mean of all or the first."""

    LAST = "last"
    MEAN = "mean"
    #: The first token.
    CLS = "cls"


#: Fields of the pooling module's config.json.
_MODES = {
    "pooling_mode_lasttoken": PoolingType.LAST,
    "pooling_mode_mean_tokens": PoolingType.MEAN,
    "pooling_mode_cls_token": PoolingType.CLS,
}


@dataclass(frozen=True, kw_only=True)
class PoolingConfig:
    """How the hidden states of a prompt become one vector."""

    type: PoolingType
    #: Whether the vector is divided by its Euclidean norm.
    normalize: bool
    task: Task = Task.EMBED
    #: Two tokens whose logits give a score: the probability of the second token against the first.
    #: Empty: the model has no such tokens.
    label_token_ids: tuple[int, ...] = ()

    @property
    def has_classifier(self) -> bool:
        """Whether the checkpoint has an output layer with one logit per label."""
        return self.task is Task.CLASSIFY and not self.label_token_ids


def load_pooling_config(
    path: Path,
    architecture: str,
    runner: str,
    *,
    is_encoder: bool = False,
    label_tokens: Sequence[str] = (),
) -> PoolingConfig | None:
    """Return the pooling configuration of the model in `path`. None: the model generates text.

    Args:
        path: folder of the checkpoint.
        architecture: name of the model's architecture in config.json.
        runner: value of the option `model.runner`.
        is_encoder: whether every token attends to the whole prompt.
        label_tokens: two tokens whose logits give a score, such as no and yes. Empty: no scores,
            unless the architecture is a classifier.

    Raises:
        ModelInvalid: a file is malformed, the pooling is not supported, or the architecture cannot
            generate although `runner` is generate.
    """
    generates = architecture.endswith(GENERATES)
    has_modules = os.path.lexists(path / MODULES_FILE)
    if runner == "generate" and not generates:
        raise ModelInvalid(
            f"{path}: {architecture} has no output layer, so it cannot generate; set model.runner "
            "to pooling or auto"
        )
    if runner == "generate":
        return None
    default = PoolingType.CLS if is_encoder else PoolingType.LAST
    if label_tokens:
        return PoolingConfig(
            type=default,
            normalize=False,
            task=Task.CLASSIFY,
            label_token_ids=_token_ids(path, label_tokens),
        )
    if architecture.endswith(CLASSIFIES):
        return PoolingConfig(type=default, normalize=False, task=Task.CLASSIFY)
    if not has_modules:
        if runner == "auto" and generates:
            return None
        return PoolingConfig(type=default, normalize=True)
    try:
        return _parse_modules(path)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelInvalid(f"{path / MODULES_FILE}: {error}") from None


def _token_ids(path: Path, tokens: Sequence[str]) -> tuple[int, ...]:
    """Return the token ids of `tokens`, the two label tokens of a classifier."""
    is_list = isinstance(tokens, list | tuple)
    if not is_list or len(tokens) != 2 or not all(isinstance(token, str) for token in tokens):
        raise ModelInvalid(f"{path}: classifier_from_token must be two tokens, got {tokens!r}")
    try:
        tokenizer = Tokenizer.from_folder(path)
    except (OSError, ValueError) as error:
        raise ModelInvalid(str(error)) from None
    ids = [tokenizer.token_id(token) for token in tokens]
    for token, token_id in zip(tokens, ids, strict=True):
        if token_id is None:
            raise ModelInvalid(f"{path}: classifier_from_token has {token!r}, which is not a token")
    return tuple(token_id for token_id in ids if token_id is not None)


def _parse_modules(path: Path) -> PoolingConfig:
    modules = parse_json(read_file(path, MODULES_FILE))
    if not isinstance(modules, list):
        raise ValueError("it must hold a list of modules")
    pooling, normalize = PoolingType.LAST, False
    for module in modules:
        kind = str(module["type"]).rpartition(".")[2]
        if kind == "Pooling":
            pooling = _parse_pooling(_read_module(path, module["path"]))
        elif kind == "Normalize":
            normalize = True
        elif kind != "Transformer":
            raise ValueError(
                f"the module {kind} is not supported; known: Transformer, Pooling, Normalize"
            )
    return PoolingConfig(type=pooling, normalize=normalize)


def _read_module(path: Path, folder: str) -> dict[str, Any]:
    """Return the config.json of the `sentence-transformers` module in subfolder `folder`."""
    if folder in ("", ".", "..") or "/" in folder or (path / folder).is_symlink():
        raise ValueError(f"the module's path {folder!r} is not a folder of the checkpoint")
    try:
        return read_json(path / folder, "config.json")
    except FileNotFoundError:
        raise ModelInvalid(f"{path / folder}/config.json is missing") from None


def _parse_pooling(config: dict[str, Any]) -> PoolingType:
    if "pooling_mode" in config:  # sentence-transformers 5
        enabled = [f"pooling_mode_{config['pooling_mode']}"]
    else:
        enabled = [name for name in config if name.startswith("pooling_mode_") and config[name]]
    for name, pooling in _MODES.items():
        if enabled in ([name], [name.removesuffix("_tokens").removesuffix("_token")]):
            return pooling
    raise ValueError(f"the pooling {', '.join(enabled)} is not supported; known: last, mean, cls")
