"""`support_torch_compile`: a model class says which dimensions of its inputs vary from step to step."""

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
    """Class decorator: `forward` can be traced as one graph, whatever the size of these dimensions.

    Args:
        dynamic: by argument of `forward`, the dimension or dimensions; negative ones count from the end. An argument may be None.

    Raises:
        TypeError: this is no class of modules, or a dimension no integer.
        ValueError: `forward` has no such argument, or nothing is dynamic.
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
                f"{model_class.__name__}: name at least one dynamic dimension of forward's arguments"
            )
        known = list(inspect.signature(model_class.forward).parameters)[1:]
        for name, each in dims.items():
            if name not in known:
                raise ValueError(
                    f"{model_class.__name__}.forward has no argument {name!r}; it has {', '.join(known)}"
                )
            if not all(type(dim) is int for dim in each):
                raise TypeError(f"dynamic dimensions of {name} must be integers, got {each}")
        setattr(model_class, _ATTRIBUTE, dims)
        return model_class

    return decorate


def mark_dynamic(model: nn.Module, arguments: Mapping[str, Any]) -> None:
    """Tells torch.compile of the dynamic dimensions of `arguments` of the model's forward.

    Raises:
        TypeError: the model's class is not decorated.
        ValueError: a tensor has no such dimension, or one of size 1 or 0, for which torch would make a graph of its own.
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
                raise ValueError(f"{name} has {tensor.dim()} dimensions; dynamic is to be {dim}")
            if tensor.shape[dim] < 2:
                raise ValueError(
                    f"trace with at least 2 in dynamic dimension {dim} of {name}, not {tensor.shape[dim]}"
                )
            torch._dynamo.mark_dynamic(tensor, dim % tensor.dim())
