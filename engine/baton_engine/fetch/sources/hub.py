"""The source for hf:// URIs: a Hugging Face hub, accessed through `huggingface_hub`.

The library reads HF_TOKEN, HF_ENDPOINT and other environment variables.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator
from functools import partial
from typing import Any

from huggingface_hub import HfApi, hf_hub_url
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
)
from huggingface_hub.file_download import http_get
from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]
from tqdm import tqdm

from baton_engine.fetch.fetch_errors import FetchError, TransientError
from baton_engine.fetch.sources.source import Listing, RemoteFile
from baton_engine.fetch.sources.uri import HubModel

#: Timeout of the request for the list of files.
TIMEOUT_S = 20.0
#: Replaces the progress bar of each file. `FetchProgress` reports the progress of all files.
_NO_BAR: Any = partial(tqdm, disable=True)


class HubSource:
    """A repository of a Hugging Face hub at one branch, tag or commit."""

    def __init__(self, model: HubModel) -> None:
        self._model = model
        self._endpoint = os.environ.get("HF_ENDPOINT") or None

    def listing(self) -> Listing:
        """Return all files of the commit to which the revision points."""
        with self._translated():
            info = HfApi(endpoint=self._endpoint).model_info(
                self._model.repo,
                revision=self._model.revision,
                files_metadata=True,
                timeout=TIMEOUT_S,
            )
        if not info.sha:
            raise FetchError("ModelInvalid", f"{self._model.uri}: the hub returned no commit")
        files = []
        for entry in info.siblings or []:
            if entry.size is None:
                raise FetchError(
                    "ModelInvalid",
                    f"{self._model.uri}: the hub returned no size for {entry.rfilename!r}",
                )
            if entry.lfs is not None:
                digest = f"sha256:{entry.lfs.sha256}"
            else:
                digest = f"git-sha1:{entry.blob_id}" if entry.blob_id else ""
            files.append(RemoteFile(entry.rfilename, entry.size, digest))
        return Listing(info.sha, tuple(files))

    def read(self, file: RemoteFile, revision: str, target: io.BufferedIOBase, offset: int) -> None:
        """Read a file from byte `offset` to the end, and append the bytes to `target`."""
        with self._translated():
            http_get(
                hf_hub_url(self._model.repo, file.name, revision=revision, endpoint=self._endpoint),
                target,  # type: ignore[arg-type]  # BinaryIO in name only
                resume_size=offset,
                headers={**build_hf_headers(), "Accept-Encoding": "identity"},
                expected_size=file.size,
                displayed_filename=file.name,
                tqdm_class=_NO_BAR,
            )

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        """Convert exceptions of `huggingface_hub` to FetchError or TransientError.

        Unknown exceptions become TransientError, because the library's network errors have no
        common base class. Errors of the local disk are not converted.
        """
        try:
            yield
        except HfHubHTTPError as error:
            raise self._refusal(error) from error
        except HFValidationError as error:
            raise FetchError("ModelInvalid", f"{self._model.uri}: {error}") from error
        except OfflineModeIsEnabled as error:
            raise FetchError(
                "ModelSourceUnavailable",
                f"{self._model.uri} is not in the cache, and HF_HUB_OFFLINE or "
                "TRANSFORMERS_OFFLINE forbids its download",
            ) from error
        except OSError as error:
            if error.errno is not None:
                raise  # an error of the local disk
            raise TransientError(f"{self._model.uri}: {error}") from error
        except Exception as error:
            raise TransientError(f"{self._model.uri}: {type(error).__name__}: {error}") from error

    def _refusal(self, error: HfHubHTTPError) -> Exception:
        status = error.response.status_code
        if isinstance(error, GatedRepoError):
            return FetchError(
                "ModelAccessDenied",
                f"{self._model.uri} is gated: its terms must be accepted by the owner of HF_TOKEN",
            )
        if status in (401, 403):
            return FetchError(
                "ModelAccessDenied",
                f"the hub answered {status} for {self._model.uri}: the repository does not exist, "
                "or HF_TOKEN is missing or has no access",
            )
        if status == 404:
            return FetchError("ModelMissing", f"the hub has no {self._model.uri}")
        if status in (408, 429) or status >= 500:
            return TransientError(f"the hub answered {status} for {self._model.uri}")
        return FetchError(
            "ModelInvalid", f"the hub answered {status} for {self._model.uri}: {error}"
        )
