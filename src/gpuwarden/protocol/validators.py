"""Validators of message fields: each turns JSON into the field's value or raises ValueError."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, field, fields
from typing import Any, TypeAlias

MAX_TEXT_CHARACTERS = 120  # of a name, device or version
MAX_DEVICES = 64  # of one run
MAX_COUNT = 2**63  # and of seconds

Validator: TypeAlias = Callable[[Any], Any]


def validated(validate: Validator, **default: Any) -> Any:
    """Declare a dataclass field of a message with its validator.

    `default` is as of `dataclasses.field`. A field whose default is None may also be null.
    """
    return field(metadata={"validate": validate}, **default)


def parse_object(cls: type[Any], value: Any) -> Any:
    """Return the dataclass that a JSON object holds; unknown fields are ignored, since newer clients may add some."""
    if not isinstance(value, dict):
        raise ValueError("expected an object")  # noqa: TRY004 - one error class for every wrong value
    parsed = {}
    for each in fields(cls):
        name = each.name
        if name not in value:
            if each.default is MISSING and each.default_factory is MISSING:
                raise ValueError(f"{name}: missing")
        elif value[name] is not None or each.default is not None:
            try:
                parsed[name] = each.metadata["validate"](value[name])
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
    return cls(**parsed)


def text_up_to(limit: int) -> Callable[[Any], str]:
    """Return a validator of printable text of at most `limit` characters."""

    def validate(value: Any) -> str:
        if not isinstance(value, str) or len(value) > limit or not value.isprintable():
            raise ValueError(f"expected printable text of at most {limit} characters")
        return value

    return validate


check_text = text_up_to(MAX_TEXT_CHARACTERS)


def clip(text: str, limit: int = MAX_TEXT_CHARACTERS) -> str:
    """Return text fit for a message: unprintable characters become spaces, the rest is cut at `limit`."""
    return "".join(c if c.isprintable() else " " for c in text[:limit])


def check_count(value: Any) -> int:
    """Validate a whole number from 0."""
    if type(value) is not int or not 0 <= value < MAX_COUNT:
        raise ValueError("expected a whole number from 0 to 2^63")
    return value


def _number_from(lowest: int) -> Callable[[Any], float]:
    def validate(value: Any) -> float:
        # math.isfinite raises OverflowError for a whole number that no float can hold.
        if type(value) not in (int, float) or not lowest <= value < MAX_COUNT:
            raise ValueError(f"expected a number from {'0' if lowest == 0 else '-2^63'} to 2^63")
        return float(value)

    return validate


check_seconds = _number_from(0)
check_number = _number_from(-MAX_COUNT)


def check_boolean(value: Any) -> bool:
    """Validate true or false."""
    if type(value) is not bool:
        raise ValueError("expected true or false")
    return value


def one_of(choices: tuple[str, ...]) -> Validator:
    """Return a validator of one of these words."""

    def validate(value: Any) -> str:
        if not isinstance(value, str) or value not in choices:
            raise ValueError(f"expected one of {', '.join(choices)}")
        return value

    return validate


def known_or(fallback: str | None, choices: tuple[str, ...]) -> Validator:
    """Return a validator of text that replaces a word that only newer clients know by `fallback`."""
    return lambda value: value if check_text(value) in choices else fallback


def counts_by(word: Validator) -> Callable[[Any], dict[str, int]]:
    """Return a validator of counts by word; counts of a word that becomes None are left out."""

    def validate(value: Any) -> dict[str, int]:
        if not isinstance(value, dict):
            raise ValueError("expected an object of counts")  # noqa: TRY004 - one error class for every wrong value
        counts: dict[str, int] = {}
        for given, entry in value.items():
            name, counted = word(given), check_count(entry)
            if name is not None:
                counts[name] = counts.get(name, 0) + counted
        return counts

    return validate


def counts(length: int) -> Callable[[Any], tuple[int, ...]]:
    """Return a validator of a list of so many counts."""

    def validate(value: Any) -> tuple[int, ...]:
        if not isinstance(value, list) or len(value) != length:
            raise ValueError(f"expected {length} counts")
        return tuple(map(check_count, value))

    return validate


def optional(validate: Validator) -> Validator:
    """Return a validator that takes null too."""
    return lambda value: None if value is None else validate(value)


def by_device(validate: Validator) -> Callable[[Any], dict[str, Any]]:
    """Return a validator of an object with an entry for each device."""

    def validate_all(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict) or len(value) > MAX_DEVICES:
            raise ValueError(f"expected an object of at most {MAX_DEVICES} devices")
        return {check_text(device): validate(entry) for device, entry in value.items()}

    return validate_all


def object_of(cls: type[Any]) -> Validator:
    """Return a validator of the JSON object of a dataclass."""
    return lambda value: parse_object(cls, value)


def list_of(validate: Validator, limit: int) -> Callable[[Any], tuple[Any, ...]]:
    """Return a validator of a list of at most `limit` entries."""

    def validate_all(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list) or len(value) > limit:
            raise ValueError(f"expected a list of at most {limit}")
        return tuple(validate(each) for each in value)

    return validate_all
