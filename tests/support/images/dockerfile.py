"""Reads the Dockerfiles in docker/. For the tests of the images and their Dockerfiles."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
LOCKS = ROOT / "docker/locks"

Instruction = tuple[str, str]


def instructions(path: Path) -> Iterator[Instruction]:
    """Yield (name, arguments), with continued lines joined and comments removed."""
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        name, _, arguments = line.partition(" ")
        yield name, re.sub(r"\s+", " ", arguments.strip())


def stages(path: Path) -> list[tuple[str, str, list[Instruction]]]:
    """Return (base, name, instructions) of each stage."""
    found: list[tuple[str, str, list[Instruction]]] = []
    for name, arguments in instructions(path):
        if name == "FROM":
            base, _, alias = arguments.partition(" AS ")
            found.append((base, alias, []))
        elif found:
            found[-1][2].append((name, arguments))
    return found


def copied(path: Path) -> list[str]:
    """Return the files and folders of this project that the Dockerfile copies."""
    return [
        source
        for _, _, lines in stages(path)
        for name, arguments in lines
        if name == "COPY" and not arguments.startswith("--from=")
        for source in arguments.split()[:-1]
    ]


def packages(source: str) -> dict[str, set[str]]:
    """Return the modules in a copied file or folder of a component, by top-level package."""
    path = ROOT / source
    found: dict[str, set[str]] = {}
    for file in path.rglob("*.py") if path.is_dir() else [path]:
        component, *names = file.relative_to(ROOT).with_suffix("").parts
        if names and component != "docker":
            module = ".".join(names).removesuffix(".__init__")
            found.setdefault(names[0], set()).add(module)
    return found


def extras(path: Path) -> list[str]:
    """Return the extras of pyproject.toml that the image's lock was made from."""
    command = lock_of(path).read_text().splitlines()[1]
    return re.findall(r"--extra ([a-z]+)", command)


def lock_of(path: Path) -> Path:
    """Return the file with the versions and hashes of the image's dependencies."""
    return LOCKS / f"{path.name.removesuffix('.Dockerfile')}.txt"


def locked(lock: Path) -> dict[str, str]:
    """Return the version of each package in the lock, all of which have hashes."""
    lines = re.findall(r"^(\S+)==(\S+) \\\n +--hash=sha256:[0-9a-f]{64}", lock.read_text(), re.M)
    assert len(lines) == lock.read_text().count("==")
    return dict(lines)


def removed_commands(path: Path) -> set[str]:
    """Return the commands of Baton that the Dockerfile removes."""
    (line,) = re.findall(
        r"cd /package/opt/baton/bin && rm ([a-z -]+)$", path.read_text(), re.MULTILINE
    )
    return set(line.split())
