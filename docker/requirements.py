"""Prints what the named extras of pyproject.toml install, one requirement a line: `python docker/requirements.py gateway engine`.

The images install dependencies before Baton itself, so that a changed line of code makes a layer of megabytes and not of gigabytes.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path


def main(extras: list[str]) -> None:
    """Raises KeyError for an extra that does not exist."""
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    wanted = [
        *project["dependencies"],
        *(line for extra in extras for line in project["optional-dependencies"][extra]),
    ]
    print("\n".join(dict.fromkeys(wanted)))


if __name__ == "__main__":
    main(sys.argv[1:])
