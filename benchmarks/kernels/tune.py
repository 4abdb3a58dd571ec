"""Measures launch configurations on the present GPU and writes kernels/baton_kernels/configurations/<device>.json.

    PYTHONPATH=engine:kernels:kv_transfer:benchmarks python3 benchmarks/kernels/tune.py [--minutes 6] [--only moe]

Each operation's candidates are tried on shapes that stand for its shape classes; a wrong result disqualifies. Entries
of classes that were not measured stay. Without a GPU, `--quick` goes through everything on Triton's interpreter and writes nothing.
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

from baton_kernels.configurations import Configuration, device_key, table_file, write_table

#: Candidates that are compiled at a time.
NUM_COMPILING = 8


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--minutes", type=float, default=6.0, help="nothing more is tried after these"
    )
    parser.add_argument(
        "--only", choices=subjects.OPERATIONS, action="append", help="may be repeated"
    )
    parser.add_argument("--quick", action="store_true", help="tiny shapes, two candidates each")
    args = parser.parse_args()
    setting = Setting(
        torch.device("cuda" if torch.cuda.is_available() else "cpu"), args.quick, repeats=3
    )
    if not setting.is_gpu and not args.quick:
        print("tune: there is no GPU here; --quick shows on the CPU that the tuner works")
        return 1
    begin = time.monotonic()
    wrong = 0
    failures: list[str] = []
    operations = args.only or list(subjects.OPERATIONS)
    file = table_file(device_key(setting.device))
    for number, operation in enumerate(operations):
        # Each operation gets its share of what time is left.
        share = (60 * args.minutes - (time.monotonic() - begin)) / (len(operations) - number)
        measured: dict[str, dict[str, Configuration | None]] = {}
        for choice in _tune(operation, setting, share, failures):
            wrong += len(choice.wrong)
            _tell(choice)
            if choice.config is not None or choice.num_untried == 0:
                measured.setdefault(choice.operation, {})[choice.shape_class] = choice.config
        if measured and setting.is_gpu:
            write_table(
                file, measured
            )  # after each operation: what was measured is not lost with a later one
        if setting.is_gpu:
            torch.cuda.empty_cache()
    if setting.is_gpu:
        print(f"tune: {file.name} written, {time.monotonic() - begin:.0f} s")
    return 1 if wrong or failures else 0


def _tune(
    operation: str, setting: Setting, share_s: float, failures: list[str]
) -> Iterator[Choice]:
    """Choices of one operation; a subject that cannot be tuned is left out: named, and added to the failures."""
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
                f"{operation}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            )
            print(f"  {failures[-1]}", flush=True)


def _with_two_candidates(subject: Subject) -> Subject:
    candidates = subject.candidates

    def two(operation: str, shape_class: str) -> list[Configuration]:
        """Of each kernel's."""
        by_names: dict[frozenset[str], list[Configuration]] = {}
        for candidate in candidates(operation, shape_class):
            by_names.setdefault(frozenset(candidate), []).append(candidate)
        return [candidate for alike in by_names.values() for candidate in alike[:2]]

    return replace(subject, candidates=two)


def _tell(choice: Choice) -> None:
    gain = choice.default_seconds / choice.seconds
    won = (
        "default"
        if choice.config is None
        else ", ".join(f"{name}={value}" for name, value in choice.config.items())
    )
    notes = [f"{choice.num_tried} tried"]
    notes += [f"{choice.num_failed} not launchable"] if choice.num_failed else []
    notes += [f"{choice.num_untried} left for want of time"] if choice.num_untried else []
    notes += [f"WRONG: {choice.wrong}"] if choice.wrong else []
    print(
        f"  {choice.operation} {choice.shape_class}: {us(choice.default_seconds)} -> {us(choice.seconds)} us, {gain:.2f}x, "
        f"{won} ({'; '.join(notes)})",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
