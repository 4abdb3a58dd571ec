"""Runs one part of the benchmark and keeps what goes wrong to itself, so that the others still run."""

from __future__ import annotations

import importlib
import traceback
from dataclasses import dataclass, field

import torch
from measure import Rows, Setting, WrongResult

from report import Goal


@dataclass
class Outcome:
    rows: Rows = field(default_factory=list)
    goals: list[Goal] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    #: Why there are no figures; empty: there are.
    failure: str = ""


def run_part(name: str, setting: Setting) -> Outcome:
    """The module `name`'s figures."""
    torch.manual_seed(0)
    setting.remarks = []
    try:
        with torch.no_grad():
            rows, goals = importlib.import_module(f"parts.{name}").run(setting)
    except WrongResult as error:
        return Outcome(failure=f"{name} is refused, for its result is wrong: {error}.")
    except ModuleNotFoundError as error:
        return Outcome(failure=f"{name} was not run: {error.name} is not installed.")
    except Exception as error:
        traceback.print_exc()
        return Outcome(
            failure=f"{name} failed: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}."
        )
    return Outcome(rows, goals, [remark for remark in setting.remarks if remark])


class PartRunner:
    """To be used in a process of its own: a kernel that reads where it must not spoils the process for all later ones."""

    def run(self, name: str, setting: Setting) -> Outcome:
        return run_part(name, setting)
