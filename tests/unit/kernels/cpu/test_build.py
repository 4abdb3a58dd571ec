"""The build of the CPU operations: when it runs, and what it replaces."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from baton_kernels import cpu
from baton_kernels.cpu import build, instruction_sets
from baton_kernels.cpu.instruction_sets import processor_flags
from support.kernels.cpu_builds import in_new_process


@pytest.mark.skipif(
    os.environ.get("BATON_REQUIRE_CPU_KERNELS") != "1",
    reason="needs BATON_REQUIRE_CPU_KERNELS=1",
)
@pytest.mark.skipif(build.compiler() is None, reason="no compiler")
@pytest.mark.skipif(
    bool(os.environ.get("BATON_CPU_KERNELS")), reason="BATON_CPU_KERNELS selects others"
)
def test_operations_compiled_by_make_install_are_loaded() -> None:
    """Without this test a failed build would only skip the tests of compiled operations."""
    if not any(one.needs <= processor_flags() for one in instruction_sets.sets_for_machine()):
        pytest.skip("the operations are not compiled for this processor")
    assert cpu.OPS is not None, cpu.DESCRIPTION


def test_a_build_replaces_the_file_of_older_sources_and_runs_once(
    built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def run(command: list[str]) -> None:
        commands.append(command)
        Path(command[command.index("-o") + 1]).touch()

    monkeypatch.setattr(build, "_run", run)
    avx2 = instruction_sets.sets_for_machine("x86_64")[-1]
    older = built / f"avx2-torch{torch.__version__}-0123456789ab.so"
    others = built / "avx2-torch0.0.1-0123456789ab.so"
    older.touch()
    others.touch()
    target = build.build(avx2, "c++")
    assert sorted(built.iterdir()) == sorted([target, others])
    assert ["-fopenmp" in command for command in commands] == [True, False], (
        "only the first command may use OpenMP, else a second one is linked"
    )
    build.build(avx2, "c++")
    assert len(commands) == 2


def test_a_build_without_a_compiler_reports_the_slower_operations(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    assert build.main() == 0
    assert "slower torch operations" in capsys.readouterr().out


def fake_compiler(path: Path, version: str) -> str:
    """Write a compiler that prints its version and compiles nothing."""
    path.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo "{version}"\n')
    path.chmod(0o755)
    return str(path)


def test_another_compiler_than_gcc_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CXX", fake_compiler(tmp_path / "clang++", "Debian clang version 14.0.6"))
    fake_compiler(tmp_path / "c++", "Debian clang version 14.0.6")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build.main() == 0
    assert "slower torch operations" in capsys.readouterr().out
    fake_compiler(tmp_path / "g++", "Copyright (C) 2022 Free Software Foundation, Inc.")
    assert build.compiler() == "g++"


def test_a_failing_compiler_does_not_fail_the_installation(
    built: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gcc = fake_compiler(built / "g++", "Copyright (C) 2022 Free Software Foundation, Inc.")
    monkeypatch.setenv("CXX", gcc)
    monkeypatch.setattr(
        build, "sets_for_machine", lambda: instruction_sets.sets_for_machine("x86_64")
    )
    assert build.main() == 0
    assert "avx512 failed" in capsys.readouterr().err
    assert list(built.iterdir()) == [Path(gcc)]


def test_the_torch_versions_can_be_selected() -> None:
    program = """
import torch
from baton_kernels import cpu
from baton_kernels.norm import rms_norm
print(cpu.OPS is not None, cpu.DESCRIPTION, rms_norm(torch.ones(1, 4), torch.ones(4), 0.0).tolist())
"""
    expected = "False torch (BATON_CPU_KERNELS=torch) [[1.0, 1.0, 1.0, 1.0]]\n"
    assert in_new_process(program, BATON_CPU_KERNELS="torch") == expected


@pytest.mark.skipif(cpu.OPS is None, reason=f"CPU kernels: {cpu.DESCRIPTION}")
def test_the_process_has_only_the_openmp_of_torch() -> None:
    maps = Path("/proc/self/maps").read_text().splitlines()
    assert len({line.split()[-1] for line in maps if "libgomp" in line or "libomp" in line}) <= 1
