"""Parses JSON bodies and checks the requests. Errors name the invalid field."""

from __future__ import annotations

import re
from typing import Any, ClassVar, Protocol, TypeVar

import msgspec

from baton_text.request_error import RequestError


class Checked(Protocol):
    """A request struct that `parse_request` can parse, and that checks its own fields."""

    __struct_fields__: ClassVar[tuple[str, ...]]
    model: str | None

    def validate(self) -> None:
        """Raise RequestError if a field is invalid."""


class LongRunning(Checked, Protocol):
    """A request that may run for hours, and that can drop values to save memory."""

    def release_prompt(self) -> None:
        """Drop values that are needed only to build the prompt and the sampling parameters."""


_Request = TypeVar("_Request", bound=Checked)

#: Decodes only the names of an object's fields, and none of the values.
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_MSGSPEC_PATH = re.compile(r"^(?P<what>.*?)(?: - at `(?P<path>.*)`)?$", re.DOTALL)
_MISSING_FIELD = re.compile(r"missing required field `(\w+)`")


def parse_request(body: bytes, kind: type[_Request]) -> _Request:
    """Parse a request from its JSON body and check it.

    Raises:
        RequestError: the JSON is malformed, or a field has a wrong type or an invalid value.
    """
    request: _Request = _decode(msgspec.json.Decoder(kind), body)
    request.validate()
    return request


def unknown_fields(body: bytes, kind: type[Checked]) -> list[str]:
    """Return the fields of the JSON object `body` that requests of type `kind` do not have.

    Raises:
        RequestError: `body` is not a JSON object, or a name in it is not valid UTF-8.
    """
    known = frozenset(kind.__struct_fields__)
    return [name for name in _decode(_FIELDS, body) if name not in known]


def _decode(decoder: msgspec.json.Decoder[Any], body: bytes) -> Any:
    try:
        return decoder.decode(body)
    except RecursionError as error:
        raise RequestError("The body is nested too deeply", code="invalid_json") from error
    except msgspec.ValidationError as error:
        raise _validation_error(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"The body is not valid JSON: {error}", code="invalid_json") from error


def _validation_error(text: str) -> RequestError:
    """Convert an error text of msgspec, such as "Expected `int`, got `str` - at `$.n`".

    The returned error names the field by its path.
    """
    match = _MSGSPEC_PATH.match(text)
    assert match is not None  # the pattern matches every text
    what = match["what"].replace("`", "")
    path = (match["path"] or "$").split("` in `")[-1].removeprefix("$").removeprefix(".")
    missing = _MISSING_FIELD.search(match["what"])
    if missing is not None:
        name = f"{path}.{missing[1]}" if path else missing[1]
        return RequestError(f"{name} is required", param=name, code="missing_required_parameter")
    if not path:
        return RequestError(f"The body must be a JSON object: {what}", code="invalid_type")
    path = path.replace("[...]", "")
    return RequestError(f"{path}: {what[:1].lower()}{what[1:]}", param=path, code="invalid_type")
