"""Times in the format of the Kubernetes API."""

from __future__ import annotations

from datetime import UTC, datetime


def timestamp(when: datetime | None = None, *, micro: bool = False) -> str:
    """Format a time, by default now, in seconds (`Time`) or in microseconds (`MicroTime`)."""
    when = (when or datetime.now(UTC)).astimezone(UTC)
    return when.strftime("%Y-%m-%dT%H:%M:%S.%fZ" if micro else "%Y-%m-%dT%H:%M:%SZ")


def parse_time(text: str | None) -> datetime | None:
    """Parse a time; None if it is missing."""
    return datetime.fromisoformat(text) if text else None
