"""`make bench SUBJECT=kernels`: measures all kernels against the device's limits and their peers.

A peer is another implementation of the same operation, for example torch's. Each result is checked
before the kernel is timed. With a GPU, the GPU kernels are measured, otherwise the CPU kernels. The
goals of the other kernels are recorded as not measured.

ARGS="--quick" tests all parts with tiny sizes. Without a GPU, this includes the GPU parts, which
then use CPU operations. `--part NAME` runs one part. Neither option writes a result.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

import torch
from goals import GOALS
from measure import Rows, Setting, tflop_s
from part_runner import Outcome, PartRunner, run_part
from remote import Remote

import report
from baton_kernels import cpu
from baton_kernels.launch_configurations import device_key
from report import Goal

#: Parts with a goal are first: the time limit can end a run.
GPU_PARTS = [
    "attention_prefill",
    "moe",
    "attention_decode",
    "engine_step",
    "kv_write",
    "block_copy",
    "block_checksum",
    "elementwise",
    "sampling",
]
CPU_PARTS = ["cpu_attention", "kv_write", "block_checksum", "elementwise", "sampling"]
PART_TIMEOUT_S = 240.0  #: Timeout of one part on a GPU.


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = sorted({*GPU_PARTS, *CPU_PARTS})
    parser.add_argument(
        "--part", choices=known, action="append", help="run only this part; may be repeated"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="tiny sizes")
    parser.add_argument(
        "--minutes", type=float, default=60.0, help="skip parts that do not end within this time"
    )
    args = parser.parse_args()
    deadline = time.perf_counter() + 60 * args.minutes
    setting = Setting(
        torch.device("cuda" if torch.cuda.is_available() else "cpu"), args.quick, args.repeats
    )
    parts = GPU_PARTS if setting.is_gpu else CPU_PARTS
    if args.quick and not setting.is_gpu:
        parts = [*GPU_PARTS, *(part for part in CPU_PARTS if part not in GPU_PARTS)]
    rows, goals, remarks, failures = _ceilings(setting), [], [], []
    report.print_table(rows)
    if setting.is_gpu:
        torch.cuda.empty_cache()  # the processes of the parts need the memory
    for name in args.part or parts:
        print(f"\n{name}", flush=True)
        start = time.perf_counter()
        if start > deadline:
            outcome = Outcome(failure=f"{name} was not run: the time limit was reached.")
        elif setting.is_gpu:
            outcome = _run_in_process(name, setting, min(PART_TIMEOUT_S, deadline - start))
        else:
            outcome = run_part(name, setting)
        report.print_table(outcome.rows)
        if outcome.failure:
            print(f"  {outcome.failure}")
            failures.append(outcome.failure)
        print(f"  ({time.perf_counter() - start:.0f} s)", flush=True)
        rows += outcome.rows
        goals += outcome.goals
        remarks += outcome.remarks
    if args.part and not args.quick:
        report.show(goals)
    elif not args.quick:
        _write(setting, rows, goals, [*failures, *remarks])
    return 1 if failures else 0


def _run_in_process(name: str, setting: Setting, timeout_s: float) -> Outcome:
    """Run a part in a separate process, so that a failure does not affect other parts."""
    try:
        process = Remote(PartRunner)
        try:
            outcome: Outcome = process.call("run", name, setting, timeout_s=timeout_s)
        finally:
            process.close()
    except (EOFError, OSError, RuntimeError) as error:  # TimeoutError is an OSError
        return Outcome(failure=f"{name} failed: {type(error).__name__}: {error}.")
    return outcome


def _ceilings(setting: Setting) -> Rows:
    """Return one row with the device's copy bandwidth and GEMM rate."""
    return [
        {
            "part": "ceilings",
            "copy GB/s": round(setting.copy_bandwidth / 1e9, 1),
            "GEMM TFLOP/s": tflop_s(setting.gemm_flops, 1),
            "dtype": str(setting.dtype).removeprefix("torch."),
        }
    ]


def _write(setting: Setting, rows: Rows, goals: list[Goal], remarks: list[str]) -> None:
    measured = {goal.name: goal for goal in goals}
    # Goals of parts that did not run here or gave a wrong result have no value.
    goals = [measured.get(goal.name, goal) for goal in GOALS.values()]
    if setting.is_gpu:
        os.environ.setdefault("BATON_MACHINE", device_key(setting.device))
    name = (
        torch.cuda.get_device_name()
        if setting.is_gpu
        else f"CPU with {torch.get_num_threads()} threads"
    )
    conditions = {"device": name, "repeats": setting.repeats, "torch": torch.__version__}
    if not setting.is_gpu:
        conditions["CPU kernels"] = cpu.DESCRIPTION
    report.write("kernels", rows, goals, remarks=" ".join(remarks), **conditions)


if __name__ == "__main__":
    sys.exit(main())
