"""The interface of engine discovery.

A discovery yields the complete set of engines after every change, never a difference. If an event
is lost, the next complete set corrects the omission.
"""

from __future__ import annotations

import abc
from collections.abc import AsyncGenerator

from baton_protocol.options.config import EngineEndpoint

ROLES = ("prefill", "decode")


class Discovery(abc.ABC):
    @abc.abstractmethod
    def watch(self) -> AsyncGenerator[list[EngineEndpoint], None]:
        """Yield all current endpoints when the iteration begins, and again after every change.

        The generator never ends. It logs transient failures and retries.
        """

    @property
    def is_scaled_to_zero(self) -> bool:
        """Whether no decode engine starts until the service is scaled up by hand.

        False if this discovery does not report it.
        """
        return False
