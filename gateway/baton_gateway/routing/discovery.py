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
        """Yield the list of all current endpoints, first at the start and then after every change.

        The generator never ends. It logs transient failures, and then retries.
        """

    @property
    def is_scaled_to_zero(self) -> bool:
        """Whether the service is scaled to zero by hand, so that no decode engine will start.

        False if this kind of discovery has no such information.
        """
        return False
