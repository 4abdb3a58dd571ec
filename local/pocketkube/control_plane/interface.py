"""The interface of control planes, embedded or real."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol


class ControlPlane(Protocol):
    """A control plane that can be started and stopped."""

    @property
    def kubeconfig(self) -> Path:
        """Path of the kubeconfig, which is valid after `start()`."""

    def start(self, timeout_s: float = 60.0) -> None:
        """Start, and wait until requests are answered.

        Raises:
            ComponentError: it did not start.
        """

    def stop(self) -> None:
        """Stop all processes and threads. Idempotent."""
