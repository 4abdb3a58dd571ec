"""The CPU operations of the best instruction set are loaded, and compute the same."""

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
from baton_kernels.cpu import instruction_sets
from baton_kernels.cpu.instruction_sets import processor_flags
from support.kernels.cpu_builds import (
    AVX2,
    AVX512,
    AVX512_BF16,
    chosen,
    in_new_process,
    pretend_to_compile,
)


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


def test_processor_flags_are_those_of_the_first_processor(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(
        "processor\t: 0\nmodel name\t: a: b\nflags\t\t: fpu avx2\nprocessor\t: 1\nflags\t\t: fpu\n"
    )
    assert processor_flags(cpuinfo) == {"fpu", "avx2"}
    assert processor_flags(tmp_path / "none") == frozenset()


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
