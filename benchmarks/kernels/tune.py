"""Measures launch configurations, and writes the best into the table of this machine's GPU.

    export PYTHONPATH=engine:kernels:kv_transfer:benchmarks
    python3 benchmarks/kernels/tune.py [--minutes 6] [--only moe]

The table is kernels/baton_kernels/launch_configurations/<device>.json. For each operation, the
script tries all candidates on shapes that represent the operation's shape classes. Candidates with
wrong results are rejected. Entries of other shape classes stay in the table. `--quick` tests the
script with Triton's interpreter, without a GPU, and writes nothing.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before kernels are imported

from measure import Setting, us
from tuning import subjects
from tuning.selection import Choice, Subject, choose

from baton_kernels.launch_configurations import Configuration, device_key, table_file, write_table

NUM_COMPILING = 8  #: Candidates that are compiled at the same time.


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--minutes", type=float, default=6.0, help="time limit for trying candidates"
    )
    parser.add_argument(
        "--only",
        choices=subjects.OPERATIONS,
        action="append",
        help="tune only this operation; may be repeated",
    )
    parser.add_argument("--quick", action="store_true", help="tiny shapes, two candidates each")
    args = parser.parse_args()
    setting = Setting(
        torch.device("cuda" if torch.cuda.is_available() else "cpu"), args.quick, repeats=3
    )
    if not setting.is_gpu and not args.quick:
        print("tune: this machine has no GPU; use --quick to test the tuner on the CPU")
        return 1
    begin = time.monotonic()
    wrong = 0
    failures: list[str] = []
    operations = args.only or list(subjects.OPERATIONS)
    file = table_file(device_key(setting.device))
    for number, operation in enumerate(operations):
        # Each operation gets an equal share of the remaining time.
        share = (60 * args.minutes - (time.monotonic() - begin)) / (len(operations) - number)
        measured: dict[str, dict[str, Configuration | None]] = {}
        for choice in _tune(operation, setting, share, failures):
            wrong += len(choice.wrong)
            _print(choice)
            if choice.config is not None or choice.num_untried == 0:
                measured.setdefault(choice.operation, {})[choice.shape_class] = choice.config
        if measured and setting.is_gpu:
            write_table(file, measured)  # after each operation: a later failure loses nothing
        if setting.is_gpu:
            torch.cuda.empty_cache()
    if setting.is_gpu:
        print(f"tune: {file.name} written, {time.monotonic() - begin:.0f} s")
    return 1 if wrong or failures else 0


def _tune(
    operation: str, setting: Setting, share_s: float, failures: list[str]
) -> Iterator[Choice]:
    """Yield the choice for each shape class of one operation.

    Args:
        share_s: seconds for this operation.
        failures: gets a message for each subject that fails.
    """
    work = subjects.OPERATIONS[operation](setting)
    begin = time.monotonic()
    for number, make in enumerate(work):
        deadline = time.monotonic() + (share_s - (time.monotonic() - begin)) / (len(work) - number)
        try:
            subject = make()
            if setting.quick:
                subject = _with_two_candidates(subject)
            with torch.no_grad():
                yield from choose(
                    subject, deadline, num_threads=NUM_COMPILING if setting.is_gpu else 0
                )
        except Exception as error:
            failures.append(
                f"{operation}: {type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
            )
            print(f"  {failures[-1]}", flush=True)


def _with_two_candidates(subject: Subject) -> Subject:
    candidates = subject.candidates

    def two(operation: str, shape_class: str) -> list[Configuration]:
        """Return at most two candidates of each kernel."""
        by_names: dict[frozenset[str], list[Configuration]] = {}
        for candidate in candidates(operation, shape_class):
            by_names.setdefault(frozenset(candidate), []).append(candidate)
        return [candidate for alike in by_names.values() for candidate in alike[:2]]

    return replace(subject, candidates=two)


def _print(choice: Choice) -> None:
    gain = choice.default_seconds / choice.seconds
    won = (
        "default"
        if choice.config is None
        else ", ".join(f"{name}={value}" for name, value in choice.config.items())
    )
    notes = [f"{choice.num_tried} tried"]
    notes += [f"{choice.num_failed} not launchable"] if choice.num_failed else []
    notes += [f"{choice.num_untried} not tried in time"] if choice.num_untried else []
    notes += [f"WRONG: {choice.wrong}"] if choice.wrong else []
    print(
        f"  {choice.operation} {choice.shape_class}: {us(choice.default_seconds)} -> "
        f"{us(choice.seconds)} us, {gain:.2f}x, {won} ({'; '.join(notes)})",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
