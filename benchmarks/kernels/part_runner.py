"""Runs one part of the benchmark. An error in the part does not stop the other parts."""

from __future__ import annotations

import importlib
import traceback
from dataclasses import dataclass, field

import torch
from measure import Rows, Setting, WrongResultError

from report import Goal


@dataclass
class Outcome:
    rows: Rows = field(default_factory=list)
    goals: list[Goal] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    failure: str = ""  #: Why there are no figures, or empty.


def run_part(name: str, setting: Setting) -> Outcome:
    """Run the module `parts.<name>`. Return the part's figures, or why there are none."""
    torch.manual_seed(0)
    setting.remarks = []
    try:
        with torch.no_grad():
            rows, goals = importlib.import_module(f"parts.{name}").run(setting)
    except WrongResultError as error:
        return Outcome(failure=f"{name} was discarded, because its result is wrong: {error}.")
    except ModuleNotFoundError as error:
        return Outcome(failure=f"{name} was not run: {error.name} is not installed.")
    except Exception as error:
        traceback.print_exc()
        return Outcome(
            failure=f"{name} failed: {type(error).__name__}: "
            f"{next(iter(str(error).splitlines()), '')}."
        )
    return Outcome(rows, goals, [remark for remark in setting.remarks if remark])


class PartRunner:
    """Runs a part in a separate process (`remote.py`).

    After an invalid memory access, CUDA is unusable in the whole process.
    """

    def run(self, name: str, setting: Setting) -> Outcome:
        return run_part(name, setting)
