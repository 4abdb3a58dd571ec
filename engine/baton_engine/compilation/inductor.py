"""Compiles the pieces of a model with Inductor, and keeps them on disk for the next start.

Importing this module takes more than a second.
"""

from __future__ import annotations

import logging
import os
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torch import fx
from torch._inductor import standalone_compile
from torch._inductor.standalone_compile import CompiledArtifact

from baton_engine.compilation.cache_key import piece_key
from baton_engine.compilation.passes import RemoveNoOps
from baton_engine.compilation.piecewise import Compiled

logger = logging.getLogger(__name__)
_CACHE_DIR = "TORCHINDUCTOR_CACHE_DIR"
_inductor_lock = threading.Lock()  # Inductor has one cache folder per process


class InductorCompiler:
    """Compiles each distinct piece once with Inductor, and keeps the results in a disk cache.

    The cache contains code that the engine executes. The cache folder must therefore belong to the
    user of this process or to root, and must not be writable by every user. Otherwise, compiled
    pieces are kept only while this process runs.

    Args:
        folder: folder of the disk cache, shared by processes. None: `default_cache_dir()`.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._root = folder
        self.folder = Path()  # folder of the current model's pieces
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._known: dict[tuple[str, int | None], Compiled] = {}

    def open(self, key: str) -> None:
        """Use the cache folder of the model with this key.

        If the cache folder cannot be used, use a temporary folder and log a warning.

        Args:
            key: the model's `environment_key`.
        """
        self._known.clear()
        try:
            self.folder = (default_cache_dir() if self._root is None else self._root) / key
            _create_private(self.folder)
        except (OSError, RuntimeError) as error:  # RuntimeError: this user has no home
            self._temporary = tempfile.TemporaryDirectory(
                prefix="baton-compile-", ignore_cleanup_errors=True
            )
            self.folder = Path(self._temporary.name)
            logger.warning(
                "compiled code is not kept for the next start (%s); "
                "set compilation.cache_dir to a folder of this user",
                error,
            )

    def compile(
        self, graph: fx.GraphModule, arguments: Sequence[Any], size: int | None
    ) -> Compiled:
        """Return the compiled piece. Compile it only if it is neither in memory nor on disk.

        Args:
            graph: the graph of the piece.
            arguments: example arguments.
            size: number of tokens for which to compile. None: any number.
        """
        key = piece_key(graph)
        if key is None:
            compiled = self._compile(graph, arguments, size, None)
        elif (key, size) not in self._known:
            path = self.folder / f"{key}-{'dynamic' if size is None else size}"
            compiled = self._known[key, size] = self._load(path) or self._compile(
                graph, arguments, size, path
            )
        else:
            compiled = self._known[key, size]
        return compiled if _returns_several(graph) else _first_of(compiled)

    def _load(self, path: Path) -> Compiled | None:
        if not path.is_file():
            return None
        try:
            with self._inductor_files():
                artifact = CompiledArtifact.load(path=str(path), format="binary")
        except Exception:  # a bad cache entry must not keep an engine from starting
            logger.warning(
                "the compiled piece in %s cannot be loaded; compiling it again",
                path,
                exc_info=True,
            )
            with suppress(OSError):
                path.unlink()
            return None
        return artifact

    def _compile(
        self, graph: fx.GraphModule, arguments: Sequence[Any], size: int | None, path: Path | None
    ) -> Compiled:
        options = {"config_patches": {"post_grad_custom_post_pass": RemoveNoOps()}}
        with self._inductor_files():
            artifact = standalone_compile(
                graph,
                list(arguments),
                dynamic_shapes="from_graph" if size is None else "from_example_inputs",
                options=options,
            )
        if path is not None:
            try:
                # Atomic, because other processes may read the file.
                artifact.save(path=str(path), format="binary")
            except Exception as error:  # the disk is full, or the piece cannot be serialized
                logger.warning(
                    "a compiled piece is not kept in %s for the next start: %s", path, error
                )
        return artifact

    @contextmanager
    def _inductor_files(self) -> Iterator[None]:
        """Make Inductor keep its kernels in the current model's folder during a `with` block."""
        with _inductor_lock:
            before = os.environ.get(_CACHE_DIR)
            os.environ[_CACHE_DIR] = str(self.folder / "inductor")
            try:
                yield
            finally:
                os.environ.pop(_CACHE_DIR, None)
                if before is not None:
                    os.environ[_CACHE_DIR] = before


def default_cache_dir() -> Path:
    """Return $XDG_CACHE_HOME/baton/compile, or ~/.cache/baton/compile if the variable is unset."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "baton" / "compile"


def _create_private(folder: Path) -> None:
    """Create the folder if it does not exist, and check that no other user controls its content.

    Raises:
        OSError: the folder cannot be created or written, is writable by every user, or belongs to a
            user who is neither this process's user nor root.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid not in (os.geteuid(), 0) or status.st_mode & 0o002:
        raise PermissionError(f"{folder} belongs to another user or is writable by every user")
    if not os.access(folder, os.W_OK):
        raise PermissionError(f"{folder} is not writable")


def _returns_several(graph: fx.GraphModule) -> bool:
    return isinstance(graph.graph.output_node().args[0], tuple | list)


def _first_of(compiled: Compiled) -> Compiled:
    """Return a function that calls `compiled` and returns one tensor, not a sequence.

    A piece loaded from disk returns a sequence even for a single tensor.
    """

    def run(*args: Any) -> Any:
        result = compiled(*args)
        return result[0] if isinstance(result, tuple | list) else result

    return run
