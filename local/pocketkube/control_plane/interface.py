"""Control planes of a local cluster: an embedded one, or a real kube-apiserver with its controllers as child processes.

Both are started and stopped the same way and are entered through the kubeconfig they write.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol


class ControlPlane(Protocol):
    """A control plane that can be started and stopped."""

    @property
    def kubeconfig(self) -> Path:
        """Valid once `start()` has returned."""

    def start(self, timeout_s: float = 60.0) -> None:
        """Serve; returns when requests are answered. Raises: ControlPlaneError."""

    def stop(self) -> None:
        """End everything that was started; safe to call twice."""


class ControlPlaneError(RuntimeError):
    """A control plane did not start; the message says why and where to look."""
