"""What an LLMService may request beyond the pods that the operator builds by itself.

An operator for several tenants checks host paths, pod templates, annotations and labels. Without
`Restrictions`, the right to create LLMServices equals the right to create pods.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec

from baton_operator.api.llmservice import Spec

#: An absolute path whose parts are neither empty nor dots. A `/` may follow the last part.
_FOLDER = re.compile(r"(/(?!\.{1,2}(/|$))[^/]+)+/?")


class HostPath(NamedTuple):
    """A folder on the nodes that a field of the spec requests to mount."""

    field: str  #: Path of the field in the spec.
    path: str
    is_writable: bool


class Restrictions(msgspec.Struct, frozen=True, kw_only=True):
    """The exceptions from the restricted Pod Security profile that LLMServices may request.

    Raises:
        ValueError: an entry of `host_paths` is not an absolute path, a writable folder overlaps
            with another entry, or an annotation prefix is empty.
    """

    #: `/DIR`: exactly this folder of nodes, to read and write. `/DIR/`: this folder and the folders
    #: below it, to read only. A pod that can write to a folder could place a symbolic link there,
    #: and another pod could mount the link's target. So no folder below a writable folder is
    #: allowed.
    host_paths: tuple[str, ...] = ()
    #: Allowed prefixes of keys, for annotations of pods and the Ingress, and for pod labels with a
    #: domain.
    annotation_prefixes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if "" in self.annotation_prefixes:
            raise ValueError("an annotation prefix must not be empty")
        for entry in self.host_paths:
            if not _FOLDER.fullmatch(entry):
                raise ValueError(f"host path {entry} must be an absolute path without . and ..")
        for writable in self._writable:
            for folder in self.host_paths:
                one, other = f"{writable}/", f"{folder.rstrip('/')}/"
                if folder != writable and (one.startswith(other) or other.startswith(one)):
                    raise ValueError(
                        f"host path {writable} is writable, so it must not overlap with {folder}: "
                        "pods could place symbolic links there"
                    )

    @property
    def _writable(self) -> list[str]:
        return [entry for entry in self.host_paths if not entry.endswith("/")]

    def allows_host_path(self, path: str, *, is_writable: bool) -> bool:
        """Return whether pods may mount the folder `path` of a node."""
        parts = [part for part in path.split("/") if part not in ("", ".")]
        folder = "/" + "/".join(parts)
        if ".." in parts or not path.startswith("/"):
            return False
        return folder in self._writable or (
            not is_writable
            and any(
                f"{folder}/".startswith(entry) for entry in self.host_paths if entry.endswith("/")
            )
        )

    def check_host_paths(self, spec: Spec) -> None:
        """Raise ValueError if `spec` requests to mount a folder of a node that is not allowed."""
        for field, path, is_writable in host_paths(spec):
            if not self.allows_host_path(path, is_writable=is_writable):
                entry = path if is_writable else f"{path.rstrip('/')}/"
                raise ValueError(
                    f"{field}: the operator's setting hostPaths does not allow the folder {path} "
                    f"of nodes; use a PersistentVolumeClaim, or add {entry} to the setting"
                )

    def check_annotations(self, annotations: Iterable[str], path: str) -> None:
        """Raise ValueError if the key of an annotation has none of the allowed prefixes.

        Args:
            annotations: keys of the annotations.
            path: path of the annotations in the spec, for the error message.
        """
        for name in annotations:
            if not name.startswith(self.annotation_prefixes):
                raise ValueError(
                    f"{path}.{name}: the operator's setting annotationPrefixes does not allow this "
                    "key; remove it, or add its prefix to the setting"
                )

    def check_labels(self, labels: Iterable[str], path: str) -> None:
        """Raise ValueError if a label with a domain, such as `a.example/b`, is not allowed.

        Webhooks and controllers of such a domain may add containers and tokens to the pod.
        """
        self.check_annotations((name for name in labels if "/" in name), path)


def host_paths(spec: Spec) -> Iterator[HostPath]:
    """Yield each folder on the nodes that `spec` requests to mount, except those in templates."""
    scheme, _, path = spec.model.uri.partition("://")
    if scheme == "file":
        yield HostPath("model.uri", path, is_writable=False)
    if spec.model.cache and spec.model.cache.host_path:
        yield HostPath("model.cache.hostPath", spec.model.cache.host_path, is_writable=True)
    for section, engine in (
        ("engine", spec.engine),
        ("prefill.engine", spec.prefill.engine if spec.prefill else None),
        ("decode.engine", spec.decode.engine),
    ):
        for name, storage in (
            ("compileCache", engine and engine.compile_cache),
            ("diagnostics", engine and engine.diagnostics),
        ):
            if storage and storage.host_path:
                yield HostPath(f"{section}.{name}.hostPath", storage.host_path, is_writable=True)
