"""A process loads the CPU operations that match its processor, torch and sources, or none."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from baton_kernels import cpu
from baton_kernels.cpu import build, instruction_sets
from baton_kernels.cpu.instruction_sets import processor_flags

AVX2, AVX512, AVX512_BF16 = (one.needs for one in instruction_sets.sets_for_machine("x86_64")[::-1])


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty folder for compiled files, as on an x86 machine."""
    monkeypatch.setattr(instruction_sets, "BUILT", tmp_path)
    monkeypatch.setattr(build, "BUILT", tmp_path)
    x86_64 = instruction_sets.sets_for_machine("x86_64")
    monkeypatch.setattr(instruction_sets, "sets_for_machine", lambda machine="x86_64": x86_64)
    return tmp_path


def pretend_to_compile(*names: str) -> None:
    for one in instruction_sets.sets_for_machine("x86_64"):
        if one.name in names:
            instruction_sets.library_file(one).touch()


def chosen(flags: frozenset[str], wanted: str = "") -> str | None:
    instruction_set, _ = instruction_sets.choose(flags, wanted)
    return None if instruction_set is None else instruction_set.name


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


def test_a_process_loads_the_best_instruction_set_of_its_processor(built: Path) -> None:
    pretend_to_compile("avx512_bf16", "avx512", "avx2")
    assert chosen(AVX512_BF16 | {"amx_tile"}) == "avx512_bf16"
    assert chosen(AVX512 | {"avx512_vnni"}) == "avx512"
    assert chosen(AVX2) == "avx2"
    assert chosen(AVX2 - {"fma"}) is None
    assert chosen(frozenset()) is None


def test_an_older_instruction_set_or_none_can_be_selected(built: Path) -> None:
    pretend_to_compile("avx512", "avx2")
    assert chosen(AVX512, "avx2") == "avx2"
    assert chosen(AVX2, "avx512") is None
    assert chosen(AVX512, "torch") is None


def test_missing_operations_are_reported_with_the_build_command(built: Path) -> None:
    assert "python -m baton_kernels.cpu.build" in instruction_sets.choose(AVX512, "")[1]
    pretend_to_compile("avx2")
    assert chosen(AVX512) == "avx2"


def test_files_of_another_torch_or_older_sources_are_not_loaded(
    built: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_to_compile("avx2")
    with monkeypatch.context() as other_torch:
        other_torch.setattr(torch, "__version__", "0.0.1")
        assert chosen(AVX2) is None
    sources = tmp_path_factory.mktemp("source")
    (sources / "ops.cpp").write_text("changed")
    monkeypatch.setattr(instruction_sets, "SOURCES", sources)
    assert chosen(AVX2) is None


def test_only_source_files_determine_the_library_file(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = tmp_path_factory.mktemp("source")
    monkeypatch.setattr(instruction_sets, "SOURCES", sources)
    avx2 = instruction_sets.sets_for_machine("x86_64")[-1]
    (sources / "ops.cpp").write_text("1")
    before = instruction_sets.library_file(avx2)
    (sources / ".ops.cpp.swp").write_text("of an editor")
    (sources / "folder").mkdir()
    assert instruction_sets.library_file(avx2) == before
    (sources / "vector.h").write_text("2")
    assert instruction_sets.library_file(avx2) != before


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


def test_processor_flags_are_those_of_the_first_processor(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(
        "processor\t: 0\nmodel name\t: a: b\nflags\t\t: fpu avx2\nprocessor\t: 1\nflags\t\t: fpu\n"
    )
    assert processor_flags(cpuinfo) == {"fpu", "avx2"}
    assert processor_flags(tmp_path / "none") == frozenset()


def in_new_process(program: str, **environment: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    ).stdout


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


@pytest.mark.skipif(cpu.OPS is None, reason=f"CPU kernels: {cpu.DESCRIPTION}")
@pytest.mark.skipif(shutil.which("objdump") is None, reason="no objdump")
def test_compiled_attention_prefetches_keys_and_values() -> None:
    """A compiler can remove functions that only prefetch, which would make attention slower."""
    chosen_set, _ = instruction_sets.choose(
        processor_flags(), os.environ.get("BATON_CPU_KERNELS", "")
    )
    command = [
        "objdump",
        "--disassemble",
        "--no-show-raw-insn",
        str(instruction_sets.library_file(chosen_set)),
    ]
    listing = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=120
    ).stdout
    functions = re.findall(r"^[0-9a-f]+ <(.+)>:\n((?:.+\n)*)", listing, re.MULTILINE)
    for pattern in (
        "5baton(6attendILb1E|10score_rows.*4NextI)",
        "5baton(3add|8add_rows|8add_tile)I.*4NextI",
    ):
        bodies = "".join(body for name, body in functions if re.search(pattern, name))
        assert re.search(r"\tprefetchnta\b", bodies)
        assert re.search(r"\tprefetcht1\b", bodies)


@pytest.mark.parametrize("name", ["avx2", "avx512"])
def test_the_operations_for_older_processors_compute_the_same(name: str) -> None:
    """The tests of this process use only the operations for this processor."""
    if cpu.OPS is None or not {"avx2": AVX2, "avx512": AVX512}[name] <= processor_flags():
        pytest.skip(f"CPU kernels: {cpu.DESCRIPTION}; or this processor lacks {name}")
    program = "from baton_kernels import cpu; print(cpu.DESCRIPTION)"
    assert in_new_process(program, BATON_CPU_KERNELS=name) == f"C++ ({name})\n"
    folder = Path(__file__).parent.parent
    files = ["linear", "norm", "rope", "activation", "attention/test_attention.py", "moe"]
    result = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"),
            *("-k", "not triton and not gemv and not gemm"),
            *(folder / file for file in files),
        ],
        env=os.environ | {"BATON_CPU_KERNELS": name},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert result.returncode == 0, result.stdout[-4000:]
