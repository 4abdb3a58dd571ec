"""Errors of process groups. This module needs no torch, so a process without a model can use it."""

from __future__ import annotations


class GroupBrokenError(RuntimeError):
    """A member of the group is gone, or the group was aborted. All later operations fail."""
