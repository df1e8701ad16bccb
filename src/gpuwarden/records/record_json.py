"""JSON of run records: unknown values have no key.

Records come from a database that a user may have changed, so reading one checks every field.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

MAX_TEXT = 4096  # characters of a text
MAX_ENTRIES = 512  # of a list or an object
MAX_NUMBER = 2.0**72  # more than the sum over all devices of a run
MAX_TIME = 253402300800.0  # Unix time of the end of the year 9999, the last with a date

T = TypeVar("T")
_Check = Callable[[Any], Any]


class RunRecordError(ValueError):
    """JSON that is no run record of a known version; the text has the reason."""


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > MAX_TEXT:
        raise RunRecordError(f"expected text of at most {MAX_TEXT} characters")
    return value


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= MAX_NUMBER:
        raise RunRecordError("expected a whole number of 0 or more")
    return value


def _number(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value <= MAX_NUMBER:
        raise RunRecordError("expected a number of 0 or more")
    return float(value)


def _signed(value: Any) -> float:
    if type(value) not in (int, float) or not abs(value) <= MAX_NUMBER:
        raise RunRecordError("expected a number")
    return float(value)


def _truth(value: Any) -> bool:
    if type(value) is not bool:
        raise RunRecordError("expected true or false")
    return value


def _time(value: Any) -> float:
    if _number(value) >= MAX_TIME:
        raise RunRecordError("expected Unix time")
    return float(value)


def _xid_code(value: Any) -> str:
    if not (_text(value).isascii() and value.isdigit()):
        raise RunRecordError("expected XID codes as keys")
    return str(value)


# A check in an annotation takes the place of its type's own.
UnixTime = Annotated[float, _time]
Signed = Annotated[float, _signed]
XidCode = Annotated[str, _xid_code]
_CHECKS: dict[Any, _Check] = {str: _text, int: _whole, float: _number, bool: _truth}


@cache
def _check(hint: Any) -> _Check:
    """Return the function that checks and converts a value from JSON by the type of its field."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return next((each for each in arguments[1:] if callable(each)), None) or _check(arguments[0])
    if origin is Literal:  # of another version it may be a text that this one does not know
        return _text
    if origin in (Union, UnionType):
        known = _check(arguments[0])
        return lambda value: None if value is None else known(value)
    if origin is tuple:
        entry = _check(arguments[0])
        return lambda value: tuple(entry(each) for each in _bounded(value, list, "a list"))
    if origin is not None:  # a mapping
        key, entry = map(_check, arguments)
        return lambda value: {key(name): entry(each) for name, each in _bounded(value, dict, "an object").items()}
    return _CHECKS.get(hint) or (lambda value: parse_document(hint, value))


def _bounded(value: Any, kind: type[T], name: str) -> T:
    if not isinstance(value, kind) or len(value) > MAX_ENTRIES:  # type: ignore[arg-type] # a list or a dict
        raise RunRecordError(f"expected {name} of at most {MAX_ENTRIES} entries")
    return value


@cache
def _checks(cls: type[Any]) -> dict[str, _Check]:
    return {name: _check(hint) for name, hint in get_type_hints(cls, include_extras=True).items()}


def json_from_record(value: Any) -> Any:
    """Return a record, or a part of it, as JSON values, without unknown ones."""
    if isinstance(value, (int, str)):  # most values: the tests below take longer
        return value
    if isinstance(value, float):
        return round(value, 6)
    if is_dataclass(value):
        found = ((each.name, getattr(value, each.name)) for each in fields(value))
        return {name: json_from_record(each) for name, each in found if each not in (None, (), {})}
    if isinstance(value, Mapping):
        return {str(key): json_from_record(each) for key, each in value.items()}
    if isinstance(value, tuple):
        return [json_from_record(each) for each in value]
    return value


def parse_document(cls: type[T], value: Any) -> T:
    """Return the document that a JSON value holds; unknown keys are ignored. Raises RunRecordError."""
    if not isinstance(value, dict):
        raise RunRecordError("expected an object")
    known: dict[str, Any] = {}
    for name, check in _checks(cls).items():  # type: ignore[arg-type] # likewise
        if name in value:
            try:
                known[name] = check(value[name])
            except RunRecordError as error:
                raise RunRecordError(f"{name}: {error}") from None
    try:
        return cls(**known)
    except TypeError:
        raise RunRecordError("a required key is missing") from None
