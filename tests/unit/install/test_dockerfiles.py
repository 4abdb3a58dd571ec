"""Checks of the Dockerfiles' text. No image is built."""

from __future__ import annotations

import fnmatch
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from support.images.dockerfile import (
    DOCKERFILES,
    LOCKS,
    ROOT,
    copied,
    extras,
    instructions,
    lock_of,
    locked,
    packages,
    removed_commands,
    stages,
)
from support.images.imports import PACKAGES, PYPROJECT, SCRIPTS, imported

PROJECT = PYPROJECT["project"]
USER = "65532:65532"
#: Shared libraries without a Python module. ucxx loads them.
LIBRARIES = {"libucx-cu12"}
#: Modules that the commands import only on other devices or with other options.
OPTIONAL: dict[str, set[str]] = {
    "engine-cpu.Dockerfile": {"nixl-cu12", "ray", "triton"},
    "engine-cuda.Dockerfile": {"ray"},
    "gateway.Dockerfile": set(),
    "operator.Dockerfile": set(),
}


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


def normalized(names: Iterable[str]) -> set[str]:
    return {re.sub("[-_.]+", "-", name).lower() for name in names}


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
        assert {base for base, _, _ in stages(path) if base not in names} == {"$BASE"}
        first, argument = next(instructions(path))
        assert first == "ARG"
        base = argument.removeprefix("BASE=")
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
                    assert in_context(source), f".dockerignore leaves {source} out"

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

    def test_every_package_has_a_hash_or_comes_from_the_index_of_torch_alone(
        self, path: Path
    ) -> None:
        runs = [
            args for name, args in instructions(path) if name == "RUN" and "pip --python" in args
        ]
        commands = [
            command.removeprefix("pip --python /opt/baton install --no-cache-dir ").strip()
            for run in runs
            for command in re.findall(r"pip --python [^&]*", run)
        ]
        torch = [command for command in commands if "TORCH_INDEX" in command]
        index = '--index-url "$TORCH_INDEX" "$(grep \'^torch==\' constraints.txt)"'
        assert [command.removeprefix("--no-deps ") for command in torch] == (
            [index] if "engine" in path.name else []
        )
        assert [command for command in commands if command not in torch] == [
            f"--no-deps --require-hashes -r {lock_of(path).name}",
            "--no-deps --require-hashes -r build.txt",
            "--no-deps --no-build-isolation --root /package .",
        ]

    def test_the_lock_has_the_dependencies_in_the_tested_versions(self, path: Path) -> None:
        versions = locked(lock_of(path))
        tested = (ROOT / "constraints.txt").read_text().splitlines()
        assert normalized(f"{name}=={versions[name]}" for name in versions) <= normalized(tested)
        needed = [*PROJECT["dependencies"]]
        for extra in extras(path):
            needed += PROJECT["optional-dependencies"][extra]
        for name in versions:
            needed += requires(name) or []
        requirements = [Requirement(line) for line in needed]
        names = normalized(
            each.name
            for each in requirements
            if each.marker is None or each.marker.evaluate({"extra": ""})
        )
        assert names - {"torch", "triton"} <= set(versions)
        assert not {"torch", "triton"} & set(versions)

    def test_no_step_mounts_files_of_another_stage(self, path: Path) -> None:
        """The cache of buildah ignores changes of mounted files (issue 6609)."""
        mounts = [arguments for _, arguments in instructions(path) if "--mount" in arguments]
        assert mounts == []

    def test_extras_exist_and_package_lists_are_removed(self, path: Path) -> None:
        assert set(extras(path)) <= set(PROJECT["optional-dependencies"])
        for _, arguments in instructions(path):
            assert "apt-get install" not in arguments or "rm -rf /var/lib/apt/lists/*" in arguments

    def test_the_image_gets_the_packages_that_its_commands_import(self, path: Path) -> None:
        wanted = imported(set(SCRIPTS) - removed_commands(path))
        got: set[str] = set()
        for source in copied(path):
            for package, found in packages(source).items():
                assert found & wanted, f"no command imports {package} of {source}"
                got |= found
        assert {module for module in wanted if module.partition(".")[0] in PACKAGES} <= got

    def test_the_image_gets_the_distributions_that_its_commands_import(self, path: Path) -> None:
        imports = {
            module.partition(".")[0] for module in imported(set(SCRIPTS) - removed_commands(path))
        }
        names = packages_distributions()
        wanted = {name for module in imports for name in names.get(module, [])} - {"baton"}
        lines = [*PROJECT["dependencies"]]
        for extra in extras(path):
            lines += PROJECT["optional-dependencies"][extra]
        got = {re.split("[>;]", line)[0] for line in lines}
        assert normalized(got) - LIBRARIES <= normalized(wanted)
        assert normalized(wanted) - normalized(got) == OPTIONAL[path.name]


def test_only_the_image_for_gpus_has_a_compiler() -> None:
    """Triton compiles on the machine that runs it."""
    with_compiler = {
        path.name
        for path in DOCKERFILES
        for name, arguments in stages(path)[-1][2]
        if name == "RUN" and re.search(r"\b(gcc|g\+\+|build-essential)\b", arguments)
    }
    assert with_compiler == {"engine-cuda.Dockerfile"}


def test_the_build_context_has_few_other_files() -> None:
    for other in (
        ".git",
        ".venv",
        "tests",
        "benchmarks",
        "build",
        "local",
        "docs",
        "shared",
        "kernels/baton_kernels/cpu/built",
    ):
        assert not in_context(other), other


def test_tools_of_the_build_have_hashes() -> None:
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert build["dependency-groups"]["build"] == build["build-system"]["requires"]
    assert set(locked(LOCKS / "build.txt")) == {"setuptools"}
    assert "cyclonedx-bom" in locked(LOCKS / "sbom.txt")


def test_the_tests_of_images_fail_without_buildah(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "tests/images", "-x", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PATH": str(tmp_path)}
    finished = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert finished.returncode == pytest.ExitCode.TESTS_FAILED
    assert "apt-get install buildah" in finished.stdout
