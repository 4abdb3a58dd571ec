"""Runs methods of `UtilityMethods` that clients and the admin HTTP port call by name.

Arguments are untrusted. If a method returns a Future, the engine's loop continues, and the caller
receives the response when the Future is done.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec

from baton_engine.core.utility_methods import UtilityMethods

#: The methods that may be called.
UTILITIES = frozenset(
    {
        "drain",
        "get_stats",
        "is_paused",
        "is_sleeping",
        "pause",
        "reset_prefix_cache",
        "resume",
        "sleep",
        "start_profile",
        "stop_profile",
        "wake_up",
    }
)


class UtilityCallError(ValueError):
    """The method does not exist, or does not take these arguments."""


def bind(method: str, args: Sequence[Any]) -> list[Any]:
    """Convert the arguments of a utility call to the method's annotated types.

    Missing arguments keep their defaults.

    Raises:
        UtilityCallError: the method does not exist, or the number or type of arguments is wrong.
    """
    parameters, hints = _signature(method)
    required = sum(parameter.default is parameter.empty for parameter in parameters.values())
    if not required <= len(args) <= len(parameters):
        wanted = (
            str(len(parameters))
            if required == len(parameters)
            else f"{required} to {len(parameters)}"
        )
        raise UtilityCallError(f"{method} takes {wanted} arguments, got {len(args)}")
    try:
        return [
            msgspec.convert(value, hints[name])
            for name, value in zip(parameters, args, strict=False)
        ]
    except msgspec.ValidationError as error:
        raise UtilityCallError(f"{method}: {error}") from error


def bind_query(method: str, query: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Convert the query of a URL to arguments of the method, by name.

    A list is given as a repeated name, or as one value with commas.

    Raises:
        UtilityCallError: the method or a name is unknown, or a value has the wrong type.
    """
    parameters, hints = _signature(method)
    unknown = sorted(query.keys() - parameters.keys())
    if unknown:
        raise UtilityCallError(
            f"{method} takes {', '.join(parameters) or 'no arguments'}, not {', '.join(unknown)}"
        )
    arguments = {}
    for name, values in query.items():
        is_list = any(
            typing.get_origin(hint) is list for hint in (hints[name], *typing.get_args(hints[name]))
        )
        value: Any = (
            [part for value in values for part in value.split(",")] if is_list else values[-1]
        )
        try:
            arguments[name] = msgspec.convert(value, hints[name], strict=False)
        except msgspec.ValidationError as error:
            # msgspec does not convert text to a Literal of integers. Convert it to int first.
            try:
                arguments[name] = msgspec.convert(
                    msgspec.convert(value, int, strict=False), hints[name]
                )
            except msgspec.ValidationError:
                raise UtilityCallError(f"{method}: {name}: {error}") from error
    return arguments


def call(
    core: UtilityMethods, method: str, args: Sequence[Any], done: Callable[[Any, str | None], None]
) -> None:
    """Call a utility method, and pass its result or an error message to `done(result, error)`.

    `done` is called once, in the engine's thread: before this function returns, or when the
    method's Future is done. An exception of the method is passed to `done` and does not end the
    engine.
    """
    try:
        result = getattr(core, method)(*bind(method, args))
    except UtilityCallError as error:
        done(None, str(error))
    except Exception as error:
        done(None, f"{method}: {error}")
    else:
        if isinstance(result, Future):
            result.add_done_callback(lambda future: _pass_result(method, future, done))
        else:
            done(result, None)


def _pass_result(method: str, future: Future[Any], done: Callable[[Any, str | None], None]) -> None:
    error = future.exception()
    if error is None:
        done(future.result(), None)
    else:
        done(None, f"{method}: {error}")


def _signature(method: str) -> tuple[Mapping[str, inspect.Parameter], dict[str, Any]]:
    """Return the parameters and the annotated types of a utility method.

    Raises:
        UtilityCallError: there is no such utility method.
    """
    if method not in UTILITIES:
        raise UtilityCallError(
            f"there is no utility method {method!r}; the methods are {', '.join(sorted(UTILITIES))}"
        )
    function = getattr(UtilityMethods, method)
    parameters = dict(inspect.signature(function).parameters)
    del parameters["self"]
    return parameters, typing.get_type_hints(function)
