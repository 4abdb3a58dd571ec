"""Names of models that `LLM` and `baton serve` take, and the folders of models in the cache."""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from baton_engine.fetch.sources.uri import HubModel, is_hub_name, parse

#: `LLM` and `baton serve` report an error after this time without a new byte.
GIVE_UP_AFTER_S = 60.0


@dataclass(frozen=True)
class CachedModel:
    """A model on a Hugging Face hub or in an object store, and its folder in the cache.

    The folder may be missing until `uri` is fetched.
    """

    #: URI with the revision.
    uri: str
    #: The name that clients use by default.
    name: str
    folder: Path

    @property
    def advice(self) -> str:
        """What the user can do if the download fails, as the end of the error message."""
        return (
            f"there is no local folder {self.name}, and {self.folder} is not complete. Without a "
            "network, pass the folder of a checkpoint, or copy this folder of the cache from a "
            "machine that has downloaded the model"
        )


def find_cached_model(
    model: str | Path, revision: str | None = None, download_dir: str | Path | None = None
) -> CachedModel | None:
    """Return the hub or object-store model that `model` names. Nothing is downloaded.

    If `model` is the path of a folder, return None.

    Args:
        model: `ORG/NAME[@REVISION]` on a hub, a URI that `baton-model fetch` accepts, or a path. An
            existing local path `ORG/NAME` takes precedence over the hub.
        revision: branch, tag or commit of a hub's model.
        download_dir: the cache folder. None: the result of `default_cache`.

    Raises:
        FetchError: the URI or the revision is invalid.
        ValueError: `revision` is given for a folder or an object store, or for a `model` that
            already names a revision.
    """
    text = str(model)
    if "://" not in text:
        if not isinstance(model, str) or os.path.lexists(text) or not is_hub_name(text):
            if revision is not None:
                raise ValueError(f"the folder {text} has no revision, got revision={revision!r}")
            return None
        text = f"hf://{text}"
    parsed = parse(text)
    if revision is not None:
        if not isinstance(parsed, HubModel) or "@" in text:
            raise ValueError(f"revision={revision!r} must not be given with {text}")
        parsed = parse(f"{text}@{revision}")
    cache = default_cache() if download_dir is None else Path(download_dir).expanduser().absolute()
    return CachedModel(parsed.uri, parsed.name, cache / _folder_name(parsed.uri))


def default_cache() -> Path:
    """Return $XDG_CACHE_HOME/baton/models, or ~/.cache/baton/models if the variable is not set."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "baton" / "models"


def _folder_name(uri: str) -> str:
    """Return a readable folder name that is unique for the URI."""
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", uri.partition("://")[2])[:80].strip("-.")
    return f"{readable}-{hashlib.sha256(uri.encode()).hexdigest()[:10]}"
