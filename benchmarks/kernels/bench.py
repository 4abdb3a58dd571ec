"""`make bench SUBJECT=kernels`: every kernel beside the device's ceilings and its peers, each checked before it is timed.

On a machine with a GPU the GPU's kernels, else the CPU's; goals of the other kind are recorded as not measured. ARGS="--quick" runs
everything at tiny sizes, to see that it works: on a machine without a GPU the GPU's parts too, with the CPU's operations;
`--part NAME` runs one part. Neither writes a result.
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
from baton_kernels.configurations import device_key
from report import Goal

GPU_PARTS = [
    "attention_decode",
    "attention_prefill",
    "moe",
    "kv_write",
    "block_copy",
    "block_checksum",
    "elementwise",
    "sampling",
    "engine_step",
]
CPU_PARTS = ["cpu_attention", "kv_write", "block_checksum", "elementwise", "sampling"]
#: For one part on a GPU.
PATIENCE_S = 240.0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = sorted({*GPU_PARTS, *CPU_PARTS})
    parser.add_argument("--part", choices=known, action="append", help="only this; may be repeated")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="tiny sizes")
    parser.add_argument(
        "--minutes", type=float, default=60.0, help="parts that are not done by then are left out"
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
        torch.cuda.empty_cache()  # the parts' processes need it
    for name in args.part or parts:
        print(f"\n{name}", flush=True)
        start = time.perf_counter()
        if start > deadline:
            outcome = Outcome(failure=f"{name} was not run, for the time was up.")
        elif setting.is_gpu:
            outcome = _apart(name, setting, min(PATIENCE_S, deadline - start))
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


def _apart(name: str, setting: Setting, patience_s: float) -> Outcome:
    """In a process of its own. However that ends, the other parts are measured."""
    try:
        process = Remote(PartRunner)
        try:
            outcome: Outcome = process.call("run", name, setting, timeout_s=patience_s)
        finally:
            process.close()
    except (EOFError, OSError, RuntimeError) as error:  # TimeoutError is an OSError
        return Outcome(failure=f"{name} failed: {type(error).__name__}: {error}.")
    return outcome


def _ceilings(setting: Setting) -> Rows:
    """Measured once; all parts of the run are compared with these."""
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
    # Those of parts that did not run here, or whose result was wrong, stay without a value.
    goals = [measured.get(goal.name, goal) for goal in GOALS.values()]
    if setting.is_gpu:
        os.environ.setdefault("BATON_MACHINE", device_key(setting.device))
    name = (
        torch.cuda.get_device_name()
        if setting.is_gpu
        else f"CPU with {torch.get_num_threads()} threads"
    )
    circumstances = {"device": name, "repeats": setting.repeats, "torch": torch.__version__}
    if not setting.is_gpu:
        circumstances["CPU kernels"] = cpu.DESCRIPTION
        remarks.append("Goals of a GPU's kernels are not measured, for this machine has none.")
    report.write("kernels", rows, goals, remarks=" ".join(remarks), **circumstances)


if __name__ == "__main__":
    sys.exit(main())
