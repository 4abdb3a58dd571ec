"""Checks of the Dockerfiles' text. No image is built."""

from __future__ import annotations

import fnmatch
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
USER = "65532:65532"

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
        else:
            found[-1][2].append((name, arguments))
    return found


def in_context(source: str) -> bool:
    """Return whether .dockerignore keeps `source`. The last matching line decides, as in Docker."""
    included = True
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.lstrip("!")
        if (
            line
            and not line.startswith("#")
            and (fnmatch.fnmatch(source, pattern) or source.startswith(f"{pattern}/"))
        ):
            included = line.startswith("!")
    return included


def test_every_component_has_a_dockerfile() -> None:
    assert [path.name.removesuffix(".Dockerfile") for path in DOCKERFILES] == [
        "engine-cpu",
        "engine-cuda",
        "gateway",
        "operator",
    ]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
class TestDockerfile:
    def test_bases_are_pinned_to_one_release(self, path: Path) -> None:
        names = {alias for _, alias, _ in stages(path)}
        bases = {base for base, _, _ in stages(path) if base not in names}
        assert len(bases) == 1
        (base,) = bases
        assert re.fullmatch(r"python:3\.\d+\.\d+-slim-[a-z]+", base), base
        assert tuple(map(int, re.findall(r"\d+", base)[:2])) >= (3, 11)
        python = ".".join(re.findall(r"\d+", base)[:2])
        assert set(re.findall(r"lib/python(3\.\d+)/", path.read_text())) <= {python}

    def test_the_last_stage_runs_as_a_user_given_by_number(self, path: Path) -> None:
        last = stages(path)[-1][2]
        assert [arguments for name, arguments in last if name == "USER"] == [USER]
        assert [name for name, _ in last][-2:] == ["USER", "ENTRYPOINT"], (
            "the stage creates files as that user"
        )

    def test_copied_files_exist(self, path: Path) -> None:
        names = {alias for _, alias, _ in stages(path)}
        for _, _, lines in stages(path):
            for name, arguments in lines:
                if name != "COPY":
                    continue
                *sources, _ = arguments.split()
                if sources[0].startswith("--from="):
                    assert sources[0].removeprefix("--from=") in names
                    continue
                for source in sources:
                    assert (ROOT / source).exists(), source
                    assert source == "." or in_context(source), f".dockerignore leaves {source} out"

    def test_entry_points_exist(self, path: Path) -> None:
        ((_, entrypoint),) = [
            (name, args) for name, args in stages(path)[-1][2] if name == "ENTRYPOINT"
        ]
        assert entrypoint.strip('[]"') in PROJECT["scripts"]
        for module in re.findall(r"python -m (baton_[\w.]+)", path.read_text()):
            assert (
                (ROOT / module.split(".")[0].removeprefix("baton_") / Path(*module.split(".")))
                .with_suffix(".py")
                .is_file()
            ), module

    def test_versions_equal_the_constraints(self, path: Path) -> None:
        runs = [
            args
            for _, _, lines in stages(path)
            for name, args in lines
            if name == "RUN" and "pip install" in args
        ]
        assert runs
        for run in runs:
            for command in re.findall(r"pip (?:install|wheel) [^&]*", run):
                assert "--no-cache-dir" in command
                assert " -c constraints" in command or "--no-deps" in command, command

    def test_extras_exist_and_package_lists_are_removed(self, path: Path) -> None:
        (line,) = re.findall(r"requirements\.py ([a-z ]+) >", path.read_text())
        assert set(line.split()) <= set(PROJECT["optional-dependencies"])
        for _, arguments in instructions(path):
            assert "apt-get install" not in arguments or "rm -rf /var/lib/apt/lists/*" in arguments


def test_only_the_image_for_gpus_has_a_compiler() -> None:
    """Triton compiles on the machine that runs it."""
    with_compiler = {
        path.name
        for path in DOCKERFILES
        for name, arguments in stages(path)[-1][2]
        if name == "RUN" and re.search(r"\b(gcc|g\+\+|build-essential)\b", arguments)
    }
    assert with_compiler == {"engine-cuda.Dockerfile"}


def test_the_build_context_has_every_package_and_few_other_files() -> None:
    where = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"][
        "find"
    ]["where"]
    assert all(in_context(folder) for folder in [*where, "pyproject.toml", "README.md"])
    for other in (
        ".git",
        ".venv",
        "tests",
        "benchmarks",
        "docs",
        "shared",
        "kernels/baton_kernels/cpu/built",
    ):
        assert not in_context(other), other


def test_requirements_equal_those_of_the_project() -> None:
    command = [sys.executable, "docker/requirements.py", "engine", "gateway"]
    printed = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=30
    ).stdout
    extras = PROJECT["optional-dependencies"]
    wanted = {*PROJECT["dependencies"], *extras["engine"], *extras["gateway"]}
    assert set(printed.splitlines()) == wanted
    assert len(printed.splitlines()) == len(wanted)
