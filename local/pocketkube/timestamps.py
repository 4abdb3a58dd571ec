"""Times in the format of the Kubernetes API."""

from __future__ import annotations

from datetime import UTC, datetime


def timestamp(when: datetime | None = None, *, micro: bool = False) -> str:
    """Format `when` (default: now) as a metav1.Time or, if `micro` is set, as a MicroTime."""
    when = (when or datetime.now(UTC)).astimezone(UTC)
    return when.strftime("%Y-%m-%dT%H:%M:%S.%fZ" if micro else "%Y-%m-%dT%H:%M:%SZ")


def parse_time(text: str | None) -> datetime | None:
    """Parse a time of the Kubernetes API. Return None for None or an empty text."""
    return datetime.fromisoformat(text) if text else None
