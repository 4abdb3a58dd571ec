"""Runs sentence-transformers through `encode` with its defaults: padded batches of 32, sorted."""

from typing import Any

import torch
from sentence_transformers import SentenceTransformer


class Runner:
    def __init__(self, model: str, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        self._model = SentenceTransformer(model, device="cpu")
        # The prompts are token IDs, as for the other candidates.
        self._model.preprocess = pad  # type: ignore[method-assign]

    def embed(self, prompts: list[list[int]]) -> list[list[float]]:
        tensors: Any = [torch.tensor(prompt) for prompt in prompts]
        return self._model.encode(tensors, show_progress_bar=False).tolist()


def pad(inputs: list[torch.Tensor], **_: Any) -> dict[str, torch.Tensor]:
    """Pad the prompts, as the model's tokenizer does."""
    masks = [torch.ones_like(prompt) for prompt in inputs]
    stack = torch.nn.utils.rnn.pad_sequence
    return {
        "input_ids": stack(inputs, batch_first=True),
        "attention_mask": stack(masks, batch_first=True),
    }
