"""Provide the model of `baton up`: the folder of --model, or a demo checkpoint.

The folder of a `file://` model is looked up in the state folder's `host/` first. So a link there
replaces the folder.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from baton_kube.client import Object
from baton_local.state import StateDir

#: URI of the demo model, for which `baton up` creates a checkpoint unless --model names one.
DEMO_MODEL_URI = "file:///models/demo"
_CHECKPOINT = ["--arch", "qwen3", "--seed", "7"]


class ModelError(Exception):
    """Raised when the model cannot be provided. The message names the correction."""


async def provide_model(
    model: Path | None, service: Object, state: StateDir, console: Console
) -> None:
    """Create a link to the model's folder, so that pods find the model at spec.model.uri.

    The folder is --model, or the demo checkpoint if the URI is DEMO_MODEL_URI. In other cases
    no link is created.

    Raises:
        ModelError: --model is not a checkpoint, or spec.model.uri is not a folder.
    """
    shutil.rmtree(state.host_root, ignore_errors=True)  # links of the last cluster
    uri = str(service.get("spec", {}).get("model", {}).get("uri"))
    if model is None:
        if uri != DEMO_MODEL_URI:
            return
        model = await _demo_checkpoint(state.models / "demo", console)
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


async def _demo_checkpoint(demo: Path, console: Console) -> Path:
    """Return the folder of the demo checkpoint. Create the checkpoint if it does not exist."""
    if not (demo / "config.json").is_file():
        console.print(f"creating a demo checkpoint in {escape(str(demo))}", style="dim")
        partial = demo.with_name("demo.partial")
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "baton_local.cli", "checkpoint", "create"),
            *(*_CHECKPOINT, "--out", str(partial)),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            output, _ = await process.communicate()
        finally:
            if process.returncode is None:  # cancelled
                process.kill()
                await process.wait()
        if process.returncode != 0:
            text = output.decode(errors="replace")
            raise ModelError(f"`baton checkpoint create` failed:\n{text}")
        partial.rename(demo)
    return demo
