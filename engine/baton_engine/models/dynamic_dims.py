"""Declaration of the input dimensions of a model that vary from step to step."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

DynamicDims = Mapping[str, int | Sequence[int]]
M = TypeVar("M", bound=type[nn.Module])
_ATTRIBUTE = "_dynamic_dims"


def support_torch_compile(dynamic: DynamicDims) -> Callable[[M], M]:
    """Declare, as a class decorator, that `forward` can be traced for all sizes of some dimensions.

    Args:
        dynamic: The dimensions of each argument of `forward`. Negative ones count from the end.
            An argument may be None in a call.

    Raises:
        TypeError: The class is not a module class, or a dimension is not an integer.
        ValueError: `forward` has no such argument, or no dimension is given.
    """
    dims = {
        name: (given,) if isinstance(given, int) else tuple(given)
        for name, given in dynamic.items()
    }

    def decorate(model_class: M) -> M:
        if not (isinstance(model_class, type) and issubclass(model_class, nn.Module)):
            raise TypeError(
                f"support_torch_compile decorates classes of modules, not {model_class!r}"
            )
        if not any(dims.values()):
            raise ValueError(
                f"{model_class.__name__}: name at least one dynamic dimension of forward's "
                f"arguments"
            )
        known = list(inspect.signature(model_class.forward).parameters)[1:]
        for name, each in dims.items():
            if name not in known:
                raise ValueError(
                    f"{model_class.__name__}.forward has no argument {name!r}; "
                    f"it has {', '.join(known)}"
                )
            if not all(type(dim) is int for dim in each):
                raise TypeError(f"dynamic dimensions of {name} must be integers, got {each}")
        setattr(model_class, _ATTRIBUTE, dims)
        return model_class

    return decorate


def mark_dynamic(model: nn.Module, arguments: Mapping[str, Any]) -> None:
    """Mark the dynamic dimensions of arguments of the model's forward for torch.compile.

    Raises:
        TypeError: The model's class is not decorated.
        ValueError: A tensor lacks the dimension, or its size is 0 or 1. For these sizes torch would
            make a graph that serves no other size.
    """
    dims: dict[str, tuple[int, ...]] | None = getattr(model, _ATTRIBUTE, None)
    if dims is None:
        raise TypeError(
            f"{type(model).__name__} cannot be compiled: decorate it with support_torch_compile"
        )
    for name, tensor in arguments.items():
        if not isinstance(tensor, Tensor):
            continue
        for dim in dims.get(name, ()):
            if not -tensor.dim() <= dim < tensor.dim():
                raise ValueError(
                    f"{name} has {tensor.dim()} dimensions, but dimension {dim} is dynamic"
                )
            if tensor.shape[dim] < 2:
                raise ValueError(
                    f"trace with at least 2 in dynamic dimension {dim} of {name}, "
                    f"not {tensor.shape[dim]}"
                )
            torch._dynamo.mark_dynamic(tensor, dim % tensor.dim())
