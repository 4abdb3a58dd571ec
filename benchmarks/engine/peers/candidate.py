"""A measured engine in its own process, with the Python interpreter that has its packages.

SIGSTOP suspends the process between calls, so that its threads do not use the cores of another
engine.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RUNNER = Path(__file__).parent / "runners" / "run.py"
LOAD_TIMEOUT_S = 900.0


@dataclass(frozen=True)
class Run:
    """Duration and result of one call.

    Attributes:
        seconds: time from the first request to the last result.
        result: the generated token IDs of each request, or the embedding of each prompt.
    """

    seconds: float
    result: list[list[Any]]


class Candidate:
    """A loaded engine.

    Args:
        python: interpreter with the engine's packages.
        module: file in `runners/`, without its suffix, that defines `Runner`.
        log: file that gets the engine's output.
        environment: variables that are added to the environment of this process.
        options: keyword arguments of `Runner`.

    Raises:
        RuntimeError: the engine cannot be loaded; the message names the log.
    """

    def __init__(
        self, python: Path, module: str, log: Path, environment: dict[str, str], **options: Any
    ) -> None:
        self._log = log
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                [python, RUNNER, module, json.dumps(options)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                env={**os.environ, **environment},
                start_new_session=True,
                text=True,
            )
        self._answer()
        self._signal(signal.SIGSTOP)

    def generate(self, works: list[tuple[list[int], int]]) -> Run:
        """Complete all prompts at once, greedily.

        Args:
            works: the token IDs of each prompt and the number of tokens to generate.
        """
        run = self._call("generate", works)
        for tokens, (_, num_tokens) in zip(run.result, works, strict=True):
            if len(tokens) != num_tokens:
                raise RuntimeError(f"{len(tokens)} tokens instead of {num_tokens}; see {self._log}")
        return run

    def embed(self, prompts: list[list[int]]) -> Run:
        """Return the embeddings of all prompts, which are token IDs."""
        return self._call("embed", prompts)

    def close(self) -> None:
        """End the process and its children."""
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _call(self, method: str, argument: Any) -> Run:
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        self._process.stdin.write(json.dumps([method, argument]) + "\n")
        self._process.stdin.flush()
        run = Run(**self._answer())
        self._signal(signal.SIGSTOP)
        return run

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._signal(signal.SIGKILL)
            raise RuntimeError(f"the engine ended; see {self._log}")
        return json.loads(line)

    def _signal(self, number: signal.Signals) -> None:
        os.killpg(self._process.pid, number)
