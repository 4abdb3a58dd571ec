"""Flags and bounds of configuration fields, declared in the annotations of the fields."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from typing import Any, NamedTuple, get_args

import msgspec


class Bound(NamedTuple):
    """Condition on the value of a field, with the text for error messages."""

    text: str  #: Completes the sentence "FIELD must".
    allows: Callable[[Any], bool]


class Option(NamedTuple):
    """Annotation of a configuration field: help, bound and command-line flag."""

    help: str
    bound: Bound | None = None
    flag: str = ""  #: Such as `--model`. Empty: the field's name.
    path: str = ""  #: Such as `model.path`. `options` sets path and type.
    type: Any = str

    def problem(self, config: msgspec.Struct) -> str | None:
        """Return an error text if the field's value in `config` is out of bounds, else None."""
        value = attrgetter(self.path)(config)
        if value is None or self.bound is None or self.bound.allows(value):
            return None
        return f"must {self.bound.text}, got {value!r}"


def options(config: type[msgspec.Struct], section: str = "") -> Iterator[Option]:
    """Yield the option of each field of a configuration, including fields of nested sections."""
    for field in msgspec.structs.fields(config):
        path = section + field.name
        if isinstance(field.type, type):
            yield from options(field.type, f"{path}.")
        else:
            kind, option = get_args(field.type)
            yield option._replace(
                flag=option.flag or "--" + field.name.replace("_", "-"), path=path, type=kind
            )


def add_flags(parser: argparse.ArgumentParser, declared: Iterable[Option]) -> None:
    """Add a flag for each option. argparse stores the flag's value under the option's path."""
    for option in declared:
        how: dict[str, Any] = (
            {"action": argparse.BooleanOptionalAction}
            if option.type is bool
            else {"type": _PARSERS.get(option.type, str), "metavar": "VALUE"}
        )
        parser.add_argument(option.flag, dest=option.path, help=option.help, **how)


def set_field(content: dict[str, Any], path: str, value: Any) -> None:
    """Set a field, such as `cache.block_size`, in the nested dicts of a configuration."""
    *sections, name = path.split(".")
    for section in sections:
        content = content.setdefault(section, {})
    content[name] = value


def at_least(low: int) -> Bound:
    return Bound(f"be at least {low}", lambda value: value >= low)


def choice(*values: str, help: str = "", flag: str = "") -> Option:
    """Return an option that allows only `values`. The default help text lists the values."""
    text = f"{', '.join(values[:-1])} or {values[-1]}"
    return Option(help or text, Bound(f"be {text}", values.__contains__), flag)


def _sizes(text: str) -> list[int]:
    """Parse integers that are separated by commas."""
    try:
        return [int(part) for part in comma_separated(text)]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must be numbers separated by commas, such as 1,2,4,8, got {text!r}"
        ) from None


def comma_separated(text: str) -> list[str]:
    """Parse strings that are separated by commas."""
    return [part.strip() for part in text.split(",") if part.strip()]


#: Parsers of flags by the type of the field. Other fields are strings.
_PARSERS: dict[Any, Callable[[str], Any]] = {
    int: int,
    int | None: int,
    float: float,
    tuple[int, ...]: _sizes,
    tuple[int, ...] | None: _sizes,
    tuple[str, ...]: comma_separated,
}
