"""Renders chat messages to a prompt text, in the same Jinja environment as `transformers`.

Templates come from checkpoints, which are untrusted. A template can loop without an end and can
double a text until the memory is full. Therefore another process compiles and renders it, with
limits, and is killed if it exceeds them.
"""

from __future__ import annotations

import json
import marshal
import os
import signal
import socket
import struct
import subprocess
import sys
import time
import weakref
from collections.abc import Sequence
from typing import Any

from baton_protocol.process.cgroups import memory_limit

#: Header of a request to the process: size of the request's data, and limit on the size of the
#: rendered text. Both are in bytes.
REQUEST = struct.Struct("<QQ")
#: Header of a reply: True before a rendered text and False before an error message, and the size of
#: that text or message in bytes.
REPLY = struct.Struct("<?Q")
#: Limit on the characters of an error. A template may raise an error with any text.
MAX_ERROR = 1000
#: Limit on the CPU time for compiling a template. The same limit applies to rendering one
#: conversation: 100,000 short messages take 0.1 s.
MAX_CPU_S = 2.0
#: Limit on the wall time of the same work. It is longer, because the CPUs may have other work.
MAX_WALL_S = 20.0
#: Limit on the address space of the process. In a container with a memory limit, at most an eighth
#: of that limit applies, because a gateway has up to three such processes.
MAX_MEMORY_BYTES = 2**30
#: The limit on the address space is never lower than this. Python itself takes a third of it.
MIN_MEMORY_BYTES = 2**27
MEMORY_SHARE = 8
#: Limit on the bytes of a rendered prompt. A larger limit applies to large conversations:
#: PROMPT_FACTOR times the bytes of messages and variables.
MAX_PROMPT_BYTES = 2**22
PROMPT_FACTOR = 8
#: Environment variables of the process. It gets no others, because some of them are secrets.
_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ")


class ChatTemplateError(ValueError):
    """Raised when the chat template refuses the messages or cannot render them."""


class TemplateProcessError(RuntimeError):
    """Raised when the process of a chat template takes too long or ends unexpectedly.

    The reason may be the host: its CPUs are overloaded, or it kills the process for lack of memory.
    A retry can succeed.
    """


class ChatTemplate:
    """A compiled chat template.

    Several threads may render at the same time. Each call of `render` has a process that
    no other call uses at the same time. Later calls reuse the process.

    Args:
        source: Jinja source text.
        special_tokens: texts of special tokens by the name of the template variable (`bos_token`).

    Raises:
        ValueError: the template is not valid Jinja, or exceeds a limit on CPU time or memory.
        TemplateProcessError: the process takes too long or ends unexpectedly.
    """

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        self.source = source
        #: Role that replaces `developer`. A template drops the messages of a role that it does not
        #: mention.
        self._developer = "developer" if "developer" in source else "system"
        self._first = marshal.dumps((source, special_tokens, MAX_CPU_S, _memory_bytes()))
        self._idle: list[_Process] = []
        weakref.finalize(self, _end_all, self._idle)
        try:
            self._idle.append(self._start())
        except ChatTemplateError as error:
            raise ValueError(f"chat template: {error}") from error

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        **variables: object,
    ) -> str:
        """Render messages to a prompt text.

        The prompt text contains its special tokens. Encode the text with add_special_tokens=False.

        Args:
            messages: JSON values, each with `role` and `content`. The role `developer` becomes
                `system` if the template does not mention `developer`.
            add_generation_prompt: append the beginning of the assistant's turn.
            variables: further template variables, such as `enable_thinking`: JSON values.

        Raises:
            ChatTemplateError: the template refuses the messages, cannot render them, or exceeds a
                limit on CPU time, memory or length.
            TemplateProcessError: the process takes too long or ends unexpectedly.
        """
        values: dict[str, Any] = {"tools": None, "documents": None, **variables}
        values["messages"] = [
            message | {"role": self._developer} if message.get("role") == "developer" else message
            for message in messages
        ]
        values["add_generation_prompt"] = add_generation_prompt
        request = _encode(values)
        process = self._take_process()
        is_text, text = _ask(process, request)
        self._idle.append(process)
        if not is_text:
            raise ChatTemplateError(text)
        return text

    def _take_process(self) -> _Process:
        """Return a process that has compiled the template."""
        while True:
            try:
                process = self._idle.pop()
            except IndexError:
                return self._start()
            if process.is_alive():
                return process
            process.end()

    def _start(self) -> _Process:
        process = _Process()
        is_compiled, text = _ask(process, self._first)
        if not is_compiled:
            process.end()
            raise ChatTemplateError(text)
        return process


def _memory_bytes() -> int:
    """Return the limit on the address space of a template process, in bytes."""
    limit = memory_limit()
    if limit is None:
        return MAX_MEMORY_BYTES
    return min(MAX_MEMORY_BYTES, max(MIN_MEMORY_BYTES, limit // MEMORY_SHARE))


def _encode(values: dict[str, Any]) -> bytes:
    """Return `values` in the format of `marshal`.

    Raises:
        ChatTemplateError: the values are not JSON, or are nested too deeply.
    """
    try:
        try:
            return marshal.dumps(values)
        except ValueError:  # a subclass of a JSON type, such as an OrderedDict or a StrEnum
            return marshal.dumps(json.loads(json.dumps(values)))
    except (TypeError, ValueError, RecursionError):
        raise ChatTemplateError(
            "messages and variables must be JSON values without deep nesting"
        ) from None


def _ask(process: _Process, request: bytes) -> tuple[bool, str]:
    """Return the result of `process.ask`. End the process if the call fails."""
    try:
        return process.ask(request)
    except BaseException as error:
        code = process.end()
        if not isinstance(error, OSError):
            raise
        if code == -signal.SIGPROF:
            raise ChatTemplateError(f"it takes more than {MAX_CPU_S:g} s of CPU time") from error
        reason = f"its process ended with code {code}"
        if isinstance(error, TimeoutError):
            reason = f"it takes more than {MAX_WALL_S:g} s"
        raise TemplateProcessError(f"the chat template was not rendered: {reason}") from error


class _Process:
    """A process of `template_worker`. Its first request must be the template."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        with theirs:
            self._process = subprocess.Popen(
                # -P: import no module from the working folder, which may be a checkpoint.
                [sys.executable, "-P", "-m", "baton_text.template_worker"],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,  # an interrupt from the terminal is meant for the parent
            )

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, request: bytes) -> tuple[bool, str]:
        """Send a request, and return (True, text) or (False, error message).

        Raises:
            OSError: the process exceeds its limits or has ended. The caller must call `end`.
        """
        deadline = time.monotonic() + MAX_WALL_S
        limit = max(MAX_PROMPT_BYTES, PROMPT_FACTOR * len(request))
        self._socket.settimeout(MAX_WALL_S)
        self._socket.sendall(REQUEST.pack(len(request), limit) + request)
        is_text, size = REPLY.unpack(self._receive(REPLY.size, deadline))
        if size > limit:
            raise ConnectionError(f"the process sends {size} bytes, above its limit of {limit}")
        return is_text, self._receive(size, deadline).decode(errors="surrogatepass")

    def end(self) -> int:
        """Kill the process unless it has ended. Return its exit code. Idempotent."""
        self._process.kill()
        code = self._process.wait()
        self._socket.close()
        return code

    def _receive(self, size: int, deadline: float) -> bytearray:
        data = bytearray()
        while len(data) < size:
            self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
            piece = self._socket.recv(min(size - len(data), 2**20))
            if not piece:
                raise ConnectionResetError("the process has ended")
            data += piece
        return data


def _end_all(processes: list[_Process]) -> None:
    for process in processes:
        process.end()
