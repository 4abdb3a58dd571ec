"""Launch kernels with constants that are not the default, such as tiles that small inputs fill.

For the kernel tests.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from baton_kernels.launch_configurations import Configuration, overriding


def launch_constants(config: Configuration | None) -> AbstractContextManager[None]:
    """Return a context in which launches and plans use `config`; None for the default constants."""
    if config is None:
        return nullcontext()
    return overriding(lambda operation, shape_class, default: {**default, **config})
