"""Print the dependencies of Baton and of extras in pyproject.toml, one per line.

Usage: python docker/requirements.py gateway engine

The images install dependencies before Baton. A code change then makes a layer of megabytes instead
of gigabytes.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path


def main(extras: list[str]) -> None:
    """Print the dependencies of Baton and of `extras`.

    Raises:
        KeyError: pyproject.toml does not have an extra of this name.
    """
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    wanted = [
        *project["dependencies"],
        *(line for extra in extras for line in project["optional-dependencies"][extra]),
    ]
    print("\n".join(dict.fromkeys(wanted)))


if __name__ == "__main__":
    main(sys.argv[1:])
