"""The source for s3:// and gs:// URIs: an object store, accessed through `obstore`.

The library reads these environment variables, among others:

- for s3: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, AWS_REGION, AWS_ENDPOINT_URL,
  AWS_SKIP_SIGNATURE (true for public buckets)
- for gs: GOOGLE_SERVICE_ACCOUNT_KEY
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import (
    BaseError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)
from obstore.store import GCSStore, S3Store

from baton_engine.fetch.fetch_errors import FetchError, TransientError
from baton_engine.fetch.selection import POOLING_FOLDER
from baton_engine.fetch.sources.source import Listing, RemoteFile
from baton_engine.fetch.sources.uri import StoredModel

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig

#: Size of one read of an object.
CHUNK_BYTES = 4 * 2**20
#: Timeout for connecting, and for one read.
TIMEOUT_S = 20
_MISSING = ("404 Not Found", "NoSuchBucket")
_DENIED = (
    "401 Unauthorized",
    "403 Forbidden",
    "InvalidAccessKeyId",
    "SignatureDoesNotMatch",
    "AccessDenied",
)


class ObjectStoreSource:
    """A model whose files are the objects under a prefix of a bucket.

    Reading an object fails if the object's ETag has changed since the listing.
    """

    def __init__(self, model: StoredModel) -> None:
        """Create the client of the object store.

        Raises:
            FetchError: the environment variables contain invalid settings.
        """
        self._model = model
        client: ClientConfig = {
            "connect_timeout": timedelta(seconds=TIMEOUT_S),
            "read_timeout": timedelta(seconds=TIMEOUT_S),
            "timeout": timedelta(days=1),  # for one object, which may be large
        }
        retry: RetryConfig = {"max_retries": 2, "retry_timeout": timedelta(seconds=TIMEOUT_S)}
        self._store: S3Store | GCSStore
        try:
            if model.scheme == "gs":
                self._store = GCSStore(model.bucket, client_options=client, retry_config=retry)
            else:
                client["allow_http"] = _endpoint().startswith("http://")
                self._store = S3Store(model.bucket, client_options=client, retry_config=retry)
        except BaseError as error:
            raise FetchError(
                "ModelSourceInvalid",
                f"invalid settings of {model.scheme}:// in the environment: {_first_line(error)}",
            ) from error
        self._tags: dict[str, str] = {}

    def listing(self) -> Listing:
        """Return the files of the model: the objects in its folder and in POOLING_FOLDER.

        The objects of other subfolders are left out. The listing's revision is a hash of the names,
        sizes and ETags of the objects.
        """
        with self._translated():
            objects = [
                entry
                for folder in (self._model.prefix, f"{self._model.prefix}/{POOLING_FOLDER}")
                for entry in obstore.list_with_delimiter(self._store, folder)["objects"]
            ]
        files, digest = [], hashlib.sha256()
        for entry in sorted(objects, key=lambda entry: entry["path"]):
            name = entry["path"].removeprefix(f"{self._model.prefix}/")
            tag = entry["e_tag"] or ""
            self._tags[name] = tag
            digest.update(f"{name}\0{entry['size']}\0{tag}\n".encode())
            files.append(RemoteFile(name, entry["size"]))
        if not files:
            raise FetchError(
                "ModelMissing", f"there is no object directly below {self._model.uri}/"
            )
        return Listing(f"sha256:{digest.hexdigest()}", tuple(files))

    def read(self, file: RemoteFile, revision: str, target: io.BufferedIOBase, offset: int) -> None:
        """Read an object from byte `offset` to the end, and append the bytes to `target`."""
        if offset >= file.size:
            return
        path = f"{self._model.prefix}/{file.name}"
        with self._translated():
            answer = obstore.get(
                self._store,
                path,
                options={"range": {"offset": offset}, "if_match": self._tags[file.name] or None},
            )
            chunks = iter(answer.stream(CHUNK_BYTES))
        while True:
            with self._translated():
                chunk = next(chunks, None)
            if chunk is None:
                return
            target.write(memoryview(chunk))

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        """Convert exceptions of `obstore` to FetchError or TransientError.

        Failures for which `obstore` has no exception class are classified by the error message.
        """
        try:
            yield
        except PreconditionError as error:
            text = f"an object of {self._model.uri} was replaced during the download"
            raise FetchError("ModelChanged", text, temporary=True) from error
        except (PermissionDeniedError, UnauthenticatedError) as error:
            raise self._denied(error) from error
        except FileNotFoundError as error:
            raise FetchError("ModelMissing", f"{self._model.uri}: {_first_line(error)}") from error
        except (BaseError, OSError) as error:
            text = str(error)
            if any(word in text for word in _DENIED):
                raise self._denied(error) from error
            if any(word in text for word in _MISSING):
                raise FetchError(
                    "ModelMissing", f"{self._model.uri}: {_first_line(error)}"
                ) from error
            raise TransientError(f"{self._model.uri}: {_first_line(error)}") from error
        except BaseException as error:
            if type(error).__name__ != "PanicException":
                raise
            # The library panics on settings that it does not check. A panic is not an Exception.
            raise FetchError(
                "ModelSourceInvalid",
                f"{self._model.uri}: the library failed on the settings in the environment: "
                f"{_first_line(error)}",
            ) from error

    def _denied(self, error: Exception) -> FetchError:
        return FetchError(
            "ModelAccessDenied",
            f"the credentials in the environment have no access to {self._model.uri}: "
            f"{_first_line(error)}",
        )


def _endpoint() -> str:
    """Return the value of AWS_ENDPOINT_URL, or an empty string if the variable is not set.

    Raises:
        FetchError: the value is not an HTTP or HTTPS URL (ModelSourceInvalid).
    """
    url = os.environ.get("AWS_ENDPOINT_URL")
    if url is None:
        return ""
    try:
        parts = urlsplit(url)
        usable = (
            url.startswith(("http://", "https://")) and bool(parts.hostname) and parts.port != 0
        )
    except ValueError:  # an invalid port or host
        usable = False
    if not usable or not url.isascii() or not url.isprintable() or " " in url:
        raise FetchError(
            "ModelSourceInvalid",
            f"AWS_ENDPOINT_URL must be http://HOST[:PORT] or https://HOST[:PORT], got {url!r}",
        )
    return url


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
