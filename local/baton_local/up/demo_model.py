"""Provide the model of `baton up`: the folder of --model, or the demo model.

The folder of a `file://` model is looked up first in the state folder's `host/`, then in `/`. A
link in `host/` therefore replaces the folder.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from baton_kube.client import Object
from baton_local.state_dir import StateDir

#: URI of the demo model, which `baton up` provides unless --model names another one.
DEMO_MODEL_URI = "file:///models/demo"
#: Checkpoint of the demo model, which hack/train_demo_model.py trained.
DEMO_CHECKPOINT = Path(__file__).parents[1] / "demo_checkpoint"


class ModelError(Exception):
    """Raised when the model cannot be provided. The message says what to correct."""


def provide_model(model: Path | None, service: Object, state: StateDir) -> Path | None:
    """Create a link to the model's folder, so that pods find the model at spec.model.uri.

    Returns:
        The folder: `model` (the value of --model) if set, else DEMO_CHECKPOINT. None: no link is
        created, because `model` is None and spec.model.uri is not DEMO_MODEL_URI.

    Raises:
        ModelError: `model` is set, and either it is not a checkpoint or spec.model.uri is not a
            valid `file://` URI.
    """
    shutil.rmtree(state.host_root, ignore_errors=True)  # links of the last cluster
    uri = str(service.get("spec", {}).get("model", {}).get("uri"))
    if model is None:
        if uri != DEMO_MODEL_URI:
            return None
        model = DEMO_CHECKPOINT
    elif not (model / "config.json").is_file():
        raise ModelError(
            f"--model {model}: no config.json there; name a Hugging Face checkpoint folder"
        )
    scheme, _, path = uri.partition("://")
    link = state.host_root / path.lstrip("/")
    if scheme != "file" or ".." in Path(path).parts or link == state.host_root:
        raise ModelError(
            f"--model {model} replaces a model in a folder, but spec.model.uri is {uri}; "
            f"set it to {DEMO_MODEL_URI}"
        )
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(model.resolve())
    return model
