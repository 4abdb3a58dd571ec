"""Compiles pieces with Inductor and keeps them on disk, so that the next start loads what this one compiled."""

from __future__ import annotations

import logging
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from torch import fx
from torch._inductor import standalone_compile
from torch._inductor.standalone_compile import CompiledArtifact

from baton_engine.compilation.cache_key import piece_key
from baton_engine.compilation.passes import RemoveNoOps

logger = logging.getLogger(__name__)
Compiled = Callable[..., Any]
_CACHE_DIR = "TORCHINDUCTOR_CACHE_DIR"
_one_at_a_time = threading.Lock()
"""Inductor's folder is one per process."""


class PieceCompiler(Protocol):
    def open(self, key: str) -> None:
        """What follows belongs to the graph of this key; see `environment_key`."""

    def compile(
        self, graph: fx.GraphModule, arguments: Sequence[Any], size: int | None
    ) -> Compiled:
        """A function of the graph's arguments that computes what the graph does.

        Args:
            arguments: examples: what the graph was traced with, or for a `size` real ones.
            size: the one number of tokens it is for; None: any.
        """


class NoCompiler:
    """Runs pieces as they were traced, operator by operator."""

    def open(self, key: str) -> None:
        pass

    def compile(
        self, graph: fx.GraphModule, arguments: Sequence[Any], size: int | None
    ) -> Compiled:
        return graph.forward


class InductorCompiler:
    """Pieces that compute the same are compiled once. `num_compiled` and `num_loaded` say how many came from where.

    What is loaded is code. So pieces lie in folders that this user makes for itself; where that is not possible, or somebody else
    may write into one, nothing is loaded and nothing kept.

    Args:
        folder: of the disk cache, shared by processes; None: default_cache_dir().
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._root = folder
        self.folder = Path()
        """Of the graph that is open."""
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._known: dict[tuple[str, int | None], Compiled] = {}
        self.num_compiled = 0
        self.num_loaded = 0

    def open(self, key: str) -> None:
        self._known.clear()
        try:
            self.folder = (default_cache_dir() if self._root is None else self._root) / key
            _take(self.folder)
        except (OSError, RuntimeError) as error:  # RuntimeError: this user has no home
            self._temporary = tempfile.TemporaryDirectory(
                prefix="baton-compile-", ignore_cleanup_errors=True
            )
            self.folder = Path(self._temporary.name)
            logger.warning(
                "compiled code is not kept for the next start (%s); set compilation.cache_dir to a folder of this user",
                error,
            )

    def compile(
        self, graph: fx.GraphModule, arguments: Sequence[Any], size: int | None
    ) -> Compiled:
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
        except Exception:  # of whatever kind: a cache never keeps an engine from starting
            logger.warning(
                "%s holds no compiled piece that can be used; it is compiled again",
                path,
                exc_info=True,
            )
            with suppress(OSError):
                path.unlink()
            return None
        self.num_loaded += 1
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
        self.num_compiled += 1
        if path is not None:
            try:
                artifact.save(
                    path=str(path), format="binary"
                )  # whole or not at all: others may read it
            except Exception as error:  # the disk is full, or the piece cannot be written down
                logger.warning("a compiled piece is not kept for the next start: %s", error)
        return artifact

    @contextmanager
    def _inductor_files(self) -> Iterator[None]:
        """Inductor puts kernels it builds beside our pieces, and finds them there."""
        with _one_at_a_time:
            before = os.environ.get(_CACHE_DIR)
            os.environ[_CACHE_DIR] = str(self.folder / "inductor")
            try:
                yield
            finally:
                os.environ.pop(_CACHE_DIR, None)
                if before is not None:
                    os.environ[_CACHE_DIR] = before


def default_cache_dir() -> Path:
    """$XDG_CACHE_HOME/baton/compile, or below ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "baton" / "compile"


def _take(folder: Path) -> None:
    """Makes the folder. Raises OSError if that fails, or nothing can be written there, or others than this user and root can."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid not in (os.geteuid(), 0) or status.st_mode & 0o002:
        raise PermissionError(f"{folder} belongs to another user, or everybody can write there")
    if not os.access(folder, os.W_OK):
        raise PermissionError(f"{folder} cannot be written")


def _returns_several(graph: fx.GraphModule) -> bool:
    return isinstance(graph.graph.output_node().args[0], tuple | list)


def _first_of(compiled: Compiled) -> Compiled:
    """A loaded piece returns a sequence even of one tensor, one just compiled does not."""

    def run(*args: Any) -> Any:
        result = compiled(*args)
        return result[0] if isinstance(result, tuple | list) else result

    return run
