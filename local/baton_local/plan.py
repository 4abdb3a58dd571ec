"""`baton plan`: print the steps of a rollout or resize from one manifest to another.

`baton_local.preview` computes the steps with the operator's own planner.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.text import Text

from baton_local.manifest_file import load_service
from baton_local.preview.rollout import preview
from baton_local.preview.simulated_cluster import Conditions
from baton_local.preview.steps import GroupChange, Preview, Step
from baton_local.preview.target import PreviewTarget, target_of
from baton_operator import names
from baton_operator.api.crd import custom_resource_definition
from pocketkube.apiserver.schema.structural import StructuralSchema

_STYLES = {"ready": "green", "no room": "red", "starting": "yellow", "standby": "yellow"}
MAX_VALUE_LENGTH = 60  # longest value of a changed field that is printed whole, in characters


def run_plan(files: list[Path], conditions: Conditions, max_steps: int, output: str) -> int:
    """Print the plan, and return the exit code.

    The exit code is 0 if the service reaches the state of the last manifest, and 2 if it does not.
    The exit code is 1 if a manifest is invalid, or if the names of the two services differ.

    Args:
        files: the old and the new manifest of a service, or the only manifest of a new service.
        conditions: the behavior of the simulated cluster.
        max_steps: largest number of steps in the plan.
        output: `text` or `json`.
    """
    try:
        targets = [_read(path) for path in files]
        if len({target.resolved.name for target in targets}) > 1:
            raise ValueError(
                f"the names differ: {' and '.join(target.resolved.name for target in targets)}"
            )
    except ValueError as error:
        print(f"baton plan: {error}", file=sys.stderr)
        return 1
    old, new = targets[0] if len(targets) > 1 else None, targets[-1]
    result = preview(old, new, conditions, max_steps)
    if output == "json":
        print(msgspec.json.format(msgspec.json.encode(result.steps)).decode())
        for reason in result.waits_for:
            print(f"baton plan: not settled: {reason}", file=sys.stderr)
    else:
        console = Console(highlight=False, soft_wrap=True)
        for line in (*_header(old, new, result), *_steps(result), *_end(result)):
            console.print(line if isinstance(line, Text) else Text(line))
    return 2 if result.waits_for else 0


def _read(path: Path) -> PreviewTarget:
    """Return the only LLMService of a file, with its desired state.

    Raises:
        ValueError: the file does not have exactly one valid LLMService. The message names the file,
            the field and the reason.
    """
    _, service = load_service(path)
    if service["apiVersion"] != names.API_VERSION:
        raise ValueError(
            f"{path}: apiVersion must be {names.API_VERSION}, got {service['apiVersion']}"
        )
    schema = StructuralSchema(
        custom_resource_definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    )
    service, unknown = schema.prune(service)
    service = schema.default(service)
    if errors := [
        *(f"{field}: unknown field" for field in unknown),
        *map(str, schema.validate(service, None)),
    ]:
        raise ValueError(f"{path}: {'; '.join(errors)}")
    try:
        return target_of(service)
    except ValueError as error:
        raise ValueError(f"{path}: InvalidSpec: spec: {error}") from None


def _header(old: PreviewTarget | None, new: PreviewTarget, result: Preview) -> Iterator[str | Text]:
    """Yield the lines before the steps: changed fields and objects, and a table of the roles."""
    yield Text(
        f"LLMService {new.resolved.name}" + (", created from nothing" if old is None else ""),
        "bold",
    )
    if old is not None:
        fields = [
            (f"  {each.path}", f"{_value(each.before)} -> {_value(each.after)}")
            for each in result.fields
        ]
        yield from _table(fields or [("  no field changes",)])
    if result.held_back:
        yield f"  paused: edits of {', '.join(result.held_back)} wait until spec.paused is false"
    for verb, objects in result.objects.items():
        if objects:
            yield f"  {verb} {', '.join(objects)}"
    yield ""
    rows = [("ROLE", "REPLICAS", "REVISION", "MAXSURGE", "MAXUNAVAILABLE")]
    for group in _used(result):
        strategy = (str(group.max_surge), str(group.max_unavailable))
        rows.append(
            (group.role, _change(*map(str, group.sizes)), _change(*group.revisions), *strategy)
        )
    yield from _table(rows)


def _steps(result: Preview) -> Iterator[str | Text]:
    """Yield the lines of each step.

    The table of members is left out if it is the same as in the previous step.
    """
    newest = {group.role: group.revisions[1] for group in result.groups}
    before: Step | None = None
    for step in result.steps:
        yield ""
        generation = "" if step.generation is None else f", topology generation {step.generation}"
        yield Text(f"Step {step.number} at {step.seconds:g} s{generation}", "bold")
        yield from (f"  - {event}" for event in step.events)
        for action in step.actions:
            yield f"  > {action.action} {', '.join(action.members)} ({action.reason})"
        if before is None or before.members != step.members:
            rows = [("    MEMBER", "REVISION", "STATE")]
            for row in step.members:
                age = "" if row.revision == newest[row.role] else " (earlier)"
                rank = "" if row.rank is None else f", rank {row.rank}"
                rows.append((f"    {row.name}", row.revision + age, row.state + rank))
            yield from _table(rows)
        before = step


def _end(result: Preview) -> Iterator[str | Text]:
    yield ""
    num_steps = f"{len(result.steps)} step{'' if len(result.steps) == 1 else 's'}"
    verb, style = ("Not settled", "bold red") if result.waits_for else ("Settled", "bold green")
    yield Text(f"{verb} after {num_steps}, {result.seconds:g} s simulated.", style)
    for group in _used(result):
        fewest, most = result.fewest_ready(group), result.most_members(group)
        yield (
            f"  {group.role}: never fewer than {fewest} of {group.sizes[1]} members served, "
            f"at most {most} existed"
        )
    if result.waits_for:
        yield "Waits for:"
        yield from (f"  {reason}" for reason in result.waits_for)


def _used(result: Preview) -> list[GroupChange]:
    return [group for group in result.groups if any(group.sizes)]


def _change(old: str, new: str) -> str:
    return f"{old} -> {new}" if old and old != new else new


def _value(value: Any) -> str:
    text = "unset" if value is None else json.dumps(value)
    return text if len(text) <= MAX_VALUE_LENGTH else f"{text[: MAX_VALUE_LENGTH - 3]}..."


def _table(rows: Sequence[tuple[str, ...]]) -> Iterator[Text]:
    """Yield a line for each row, with aligned columns and colored member states."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        line = Text("  ".join(cells).rstrip())
        for state, style in _STYLES.items():
            line.highlight_words([state], style)
        yield line
