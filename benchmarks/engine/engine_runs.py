"""Runs the sample with Baton: the whole engine with a real model, through `LLM.generate`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from workload import MAX_MODEL_LEN, Work

from baton_engine import LLM, SamplingParams


class Engine:
    """A loaded engine.

    Args:
        path: folder of the checkpoint.
        options: keyword arguments of `LLM`.
    """

    def __init__(self, path: Path, **options: Any) -> None:
        self._llm = LLM(str(path), dtype="float32", max_model_len=MAX_MODEL_LEN, **options)

    def generate(self, works: list[Work]) -> float:
        """Return the seconds for all requests, each with its own output length."""
        params = [
            SamplingParams(temperature=0.0, max_tokens=work.num_output_tokens, ignore_eos=True)
            for work in works
        ]
        start = time.perf_counter()
        results = self._llm.generate([work.prompt for work in works], params, use_tqdm=False)
        seconds = time.perf_counter() - start
        for work, result in zip(works, results, strict=True):
            assert len(result.outputs[0].token_ids) == work.num_output_tokens, (
                "a request was cut short"
            )
        self._llm.reset_prefix_cache()  # the next run computes everything again
        return seconds

    def use_prefix_caching(self, enabled: bool) -> None:
        """Switch prefix caching for the next runs.

        Both settings are measured in one process. Between two processes, the placement of memory
        pages differs, which has a larger effect than prefix caching.
        """
        self._llm._model.core.scheduler.state.kv.enable_prefix_caching = enabled

    def close(self) -> None:
        self._llm.close()
