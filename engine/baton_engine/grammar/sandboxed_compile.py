"""Compiles untrusted specifications in a child process, before the engine compiles them.

`llguidance` is native code. Some specifications, such as the schema {"enum": [-2**63]}, make it
recurse until the stack overflows. Others take minutes and gigabytes. Such a specification ends the
child process and not the engine.
"""

from __future__ import annotations

import ctypes
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Collection
from pathlib import Path

import msgspec

from baton_engine.grammar.compiler import GrammarCompiler
from baton_protocol.sampling_params import StructuredOutput, StructuredOutputKind

#: Limit on the processor time for one specification. A schema of 100 KB takes less than a second.
#: New specifications of other clients wait until the compilation ends.
MAX_CPU_S = 2
#: Limit on the wall time for one specification, including the start of the process. It is longer,
#: because the CPUs may have other work.
MAX_WALL_S = 120.0
#: Memory that the compilation of one specification may allocate.
MAX_MEMORY_BYTES = 256 * 2**20
#: Stack of the thread that compiles. The engine's threads have at least 2 MiB, so a specification
#: that passes the trial does not overflow their stacks.
STACK_BYTES = 2**20


class GrammarTrial:
    """Compiles specifications in a child process, which the first `check` starts. Thread-safe.

    Args:
        model_path: the folder of the checkpoint.
        vocab_size: width of the logits.
        eos_token_ids: the model's EOS tokens.
    """

    def __init__(self, model_path: Path, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        self._arguments = [str(model_path), str(vocab_size), *map(str, sorted(eos_token_ids))]
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    def check(self, spec: StructuredOutput) -> int:
        """Compile a specification in the child process. Return the grammar's size in bytes.

        Raises:
            ValueError: the specification is invalid, or its compilation crashes the child process
                or takes more than MAX_CPU_S, MAX_WALL_S or MAX_MEMORY_BYTES.
        """
        with self._lock:
            answer = self._ask(spec)
        if not answer:
            raise ValueError(
                f"structured_output.spec of kind {spec.kind.value} is too complex: it cannot be "
                f"compiled with {MAX_CPU_S} s of processor time and {MAX_MEMORY_BYTES >> 20} MiB"
            )
        error, num_bytes = msgspec.json.decode(answer, type=tuple[str, int])
        if error:
            raise ValueError(error)
        return num_bytes

    def close(self) -> None:
        """End the child process. A running `check` raises ValueError. Callable from any thread."""
        self._closed = True
        if (process := self._process) is not None:
            process.kill()

    def _ask(self, spec: StructuredOutput) -> bytes:
        """Send `spec` to the child process, and return its answer as a line of JSON.

        Start the child process if none is running. The answer is empty if the child process ends
        without one, or after `close`.
        """
        if self._closed:
            return b""
        if self._process is None:
            self._process = subprocess.Popen(
                # -P: import no module from the working folder, which may be a checkpoint.
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "baton_engine.grammar.sandboxed_compile",
                    *self._arguments,
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "MALLOC_ARENA_MAX": "1", "RUST_BACKTRACE": "0"},
                start_new_session=True,  # a Ctrl-C in a terminal ends the engine first
            )
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        timer = threading.Timer(MAX_WALL_S, process.kill)
        timer.daemon = True
        timer.start()
        try:
            process.stdin.write(msgspec.json.encode((spec.kind, spec.spec)) + b"\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = b""
        finally:
            timer.cancel()
        if not answer.endswith(b"\n"):
            answer = b""
            process.kill()
            process.wait()
            process.stdout.close()
            self._process = None
        return answer


def main() -> None:
    """Read specifications from stdin, and write the result of `_compile` for each to stdout."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_serve)
    thread.start()
    thread.join()


def _serve() -> None:
    model_path, vocab_size, *eos_token_ids = sys.argv[1:]
    compiler = GrammarCompiler(Path(model_path), int(vocab_size), set(map(int, eos_token_ids)))
    _compile(compiler, StructuredOutput(StructuredOutputKind.JSON_OBJECT))  # reads the tokenizer
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MAX_MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    decoder = msgspec.json.Decoder(tuple[StructuredOutputKind, str])
    for line in sys.stdin.buffer:
        used = resource.getrusage(resource.RUSAGE_SELF)
        deadline = int(used.ru_utime + used.ru_stime) + MAX_CPU_S + 1
        resource.setrlimit(resource.RLIMIT_CPU, (deadline, resource.RLIM_INFINITY))
        result = _compile(compiler, StructuredOutput(*decoder.decode(line)))
        sys.stdout.buffer.write(msgspec.json.encode(result) + b"\n")
        sys.stdout.buffer.flush()


def _compile(compiler: GrammarCompiler, spec: StructuredOutput) -> tuple[str, int]:
    """Compile a specification, and discard the grammar.

    Returns:
        (error message, size of the grammar in bytes). On success, the message is empty. On
        failure, the size is 0.
    """
    before = _num_allocated()
    try:
        matcher = compiler.compile(spec)
    except ValueError as error:
        return str(error), 0
    num_bytes = _num_allocated() - before
    del matcher
    return "", max(num_bytes, 0)


class _Mallinfo(ctypes.Structure):
    """The result of glibc's `mallinfo`."""

    _fields_ = tuple(
        (name, ctypes.c_int)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def _num_allocated() -> int:
    """Return how many bytes from `malloc` are in use. 0 if the C library has no `mallinfo`."""
    if (mallinfo := getattr(ctypes.CDLL(None), "mallinfo", None)) is None:
        return 0
    mallinfo.restype = _Mallinfo
    info = mallinfo()
    return int(info.uordblks + info.hblkhd)


if __name__ == "__main__":
    main()
