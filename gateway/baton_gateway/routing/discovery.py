"""The interface of engine discovery.

A discovery yields the complete set of engines after every possible change, never a difference.
The next set therefore repairs a lost event.
"""

from __future__ import annotations

import abc
from collections.abc import AsyncGenerator

from baton_protocol.config import EngineEndpoint

ROLES = ("prefill", "decode")


class Discovery(abc.ABC):
    @abc.abstractmethod
    def watch(self) -> AsyncGenerator[list[EngineEndpoint], None]:
        """Yield the current endpoints, and all of them again after every change.

        The generator never ends. It logs transient failures and retries.
        """
