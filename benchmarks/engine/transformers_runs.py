"""Runs the sample with transformers: `generate` on padded batches, or continuous batching."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from workload import MAX_MODEL_LEN, Work

PAGE_SIZE = 256  # the default of transformers


class Transformers:
    def __init__(self, path: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._path = path
        self._model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    @torch.inference_mode()
    def generate(self, works: list[Work], batch_size: int) -> float:
        """Return the seconds for all requests in padded batches.

        Requests are sorted by output length to reduce padding. A static batch runs until its
        longest output ends. The caller counts only the requested tokens. On two cores, one batch of
        64 took three times as long as batches of 16: `generate(works, 64)`.
        """
        start = time.perf_counter()
        ordered = sorted(works, key=lambda work: work.num_output_tokens)
        for first in range(0, len(ordered), batch_size):
            batch = ordered[first : first + batch_size]
            width = max(len(work.prompt) for work in batch)
            input_ids = torch.zeros(len(batch), width, dtype=torch.long)
            mask = torch.zeros_like(input_ids)
            for row, work in enumerate(batch):
                input_ids[row, width - len(work.prompt) :] = torch.tensor(work.prompt)
                mask[row, width - len(work.prompt) :] = 1
            num_new = max(work.num_output_tokens for work in batch)
            out = self._model.generate(
                input_ids=input_ids,
                attention_mask=mask,
                do_sample=False,
                min_new_tokens=num_new,
                max_new_tokens=num_new,
                pad_token_id=0,
            )
            assert out.shape[1] == width + num_new
        return time.perf_counter() - start

    def generate_batch(self, works: list[Work]) -> float:
        """Return the seconds for all requests with continuous batching."""
        from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

        model: Any = AutoModelForCausalLM.from_pretrained(
            self._path, dtype=torch.float32, attn_implementation="sdpa"
        ).eval()
        generation = GenerationConfig(
            do_sample=False, max_new_tokens=MAX_MODEL_LEN, eos_token_id=-1, pad_token_id=0
        )
        # Memory for all requests at once, so that no request waits for memory.
        pages = sum(-(-work.num_tokens // PAGE_SIZE) for work in works)
        batching = ContinuousBatchingConfig(
            page_size=PAGE_SIZE, num_blocks=pages + 1, max_batch_tokens=512
        )
        with model.continuous_batching_context_manager(
            generation_config=generation, continuous_batching_config=batching, warmup=False
        ) as manager:
            start = time.perf_counter()
            wanted = {
                manager.add_request(
                    work.prompt, max_new_tokens=work.num_output_tokens, eos_token_id=-1
                ): work
                for work in works
            }
            while wanted:
                result = manager.get_result(timeout=1.0)
                if result is not None and result.is_finished():
                    work = wanted.pop(result.request_id)
                    assert len(result.generated_tokens) == work.num_output_tokens, (
                        "the peer cut a request short"
                    )
                if not manager.is_running():
                    raise RuntimeError("transformers' continuous batching stopped")
            return time.perf_counter() - start
