"""What can go wrong between ranks. Without torch, so that processes without a model can name it."""

from __future__ import annotations


class GroupBrokenError(RuntimeError):
    """A member of the group is gone, or the group was aborted: no operation of it will succeed any more."""
