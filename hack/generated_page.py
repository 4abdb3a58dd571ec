"""The command line of the scripts that generate a page of the documentation."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path


def main(description: str | None, render: Callable[[str], str]) -> int:
    """Write the generated page. With `--check`, only compare it with the present page.

    Args:
        description: the help text.
        render: returns the page's new text. Its argument is the present text, empty for a new page.

    Returns:
        The exit code: 1 if `--check` finds that the page is stale, else 0.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("page", type=Path)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    present = args.page.read_text() if args.page.exists() else ""
    wanted = render(present)
    if wanted == present:
        return 0
    if args.check:
        print(f"stale: {args.page}; run `make manifests`", file=sys.stderr)
        return 1
    args.page.write_text(wanted)
    return 0
