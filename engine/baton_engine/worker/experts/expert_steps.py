"""The parts of a step that only an expert-parallel rank runs."""

from __future__ import annotations

import torch
from torch import Tensor

from baton_engine.distributed.group import Group
from baton_engine.distributed.group_errors import GroupBrokenError
from baton_engine.models.forward_context import ForwardBatch, ForwardContext, forward_context
from baton_engine.models.layers import Model
from baton_engine.worker.forward import dummy_steps
from baton_engine.worker.forward.forward_runner import ForwardRunner


class ExpertSteps:
    """Runs steps and dummy batches, and detects expert groups in which an exchange failed.

    In a dummy batch, a rank without tokens runs its experts on the tokens of other ranks.
    """

    def __init__(self, model: Model, tensor_group: Group, device: torch.device) -> None:
        self._model = model
        self._tensor_group = tensor_group
        self._device = device

    def run(
        self,
        forward_runner: ForwardRunner,
        batch: ForwardBatch,
        received: Tensor | None,
        wave_tokens: tuple[int, ...],
    ) -> Tensor:
        """Run the forward of a step in which this rank has tokens.

        Args:
            forward_runner: runs the model.
            batch: the step's tokens.
            received: output of the previous pipeline stage. None on the first stage.
            wave_tokens: number of tokens of each rank in this step. Empty: this rank runs alone.

        Raises:
            RuntimeError: the sparse layers have no experts, because no generation (ranks and expert
                placement) has been committed.
            GroupBrokenError: an expert group broke; see `_check_expert_groups`.
        """
        if self._model.sparse_layers[0][1].shard is None:
            raise RuntimeError("a step has tokens, but no generation has been committed")
        batch.context.wave_tokens = wave_tokens
        hidden = forward_runner.run(batch, received)
        self._check_expert_groups(batch.context)
        return hidden

    def run_dummy_batch(self, kv_cache: Tensor, wave_tokens: tuple[int, ...]) -> None:
        """Run the sparse layers with a dummy batch, in a step where only other ranks have tokens.

        Args:
            kv_cache: KV cache of this rank.
            wave_tokens: number of tokens of each rank in this step.

        Raises:
            GroupBrokenError: an expert group broke; see `_check_expert_groups`.
        """
        context = dummy_steps.no_batch(kv_cache, self._device)
        context.wave_tokens = wave_tokens
        with forward_context(context):
            self._model.run_dummy_batch()
        self._check_expert_groups(context)

    def _check_expert_groups(self, context: ForwardContext) -> None:
        """Check after a forward that no expert group broke. Collective among tensor ranks.

        Each tensor rank belongs to a different expert group.

        Raises:
            GroupBrokenError: an expert group broke. All tensor ranks raise the error, even if only
                one group broke.
        """
        one_is_broken = False
        if self._tensor_group.size > 1:
            own = torch.tensor([context.broken is not None], dtype=torch.int64, device=self._device)
            one_is_broken = self._tensor_group.all_reduce(own).item() > 0
        if context.broken is not None:
            raise context.broken
        if one_is_broken:
            raise GroupBrokenError("the expert group of another tensor rank is broken")
