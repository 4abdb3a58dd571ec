"""Steps of a rank whose experts are spread: those without tokens of its own, and those in which the expert group breaks."""

from __future__ import annotations

import torch
from torch import Tensor

from baton_engine.distributed.errors import GroupBrokenError
from baton_engine.distributed.group import Group
from baton_engine.models.forward_context import ForwardContext, forward_context
from baton_engine.models.layers import CausalLM
from baton_engine.worker import dummy_steps


def take_part(
    model: CausalLM,
    kv_cache: Tensor,
    wave_tokens: tuple[int, ...],
    tensor_group: Group,
    device: torch.device,
) -> None:
    """A step of the other ranks' tokens. Raises GroupBrokenError as `check_unbroken` does."""
    context = dummy_steps.no_batch(kv_cache, device)
    context.wave_tokens = wave_tokens
    with forward_context(context):
        model.take_part()
    check_unbroken(context, tensor_group, device)


def check_unbroken(context: ForwardContext, tensor_group: Group, device: torch.device) -> None:
    """At the end of a forward, on all tensor ranks: each has an expert group of its own, and none may go on if one broke.

    Raises:
        GroupBrokenError: on all of them.
    """
    one_is_broken = False
    if tensor_group.size > 1:
        own = torch.tensor([context.broken is not None], dtype=torch.int64, device=device)
        one_is_broken = tensor_group.all_reduce(own).item() > 0
    if context.broken is not None:
        raise context.broken
    if one_is_broken:
        raise GroupBrokenError("the expert group of another tensor rank is broken")
