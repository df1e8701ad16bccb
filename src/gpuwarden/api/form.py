"""The form of an answer in JSON: a row a key, which owns its name, its meaning and its reader.

What is None, or an empty list or object, has no key, unless the row says that it is always there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from gpuwarden.metric import Metric, Reading

Subject = TypeVar("Subject")
Json = dict[str, Any]
_CONTAINERS = frozenset({tuple, list, dict})
_DIGITS = 6
_INFINITE = float("inf")
API_VERSION = 1
_encode = json.JSONEncoder(separators=(",", ":")).encode


class Written(str):
    """A value that is JSON already."""

    __slots__ = ()


@dataclass(frozen=True)  # no slots: they break Key[Subject](…) on Python 3.11
class Key(Generic[Subject]):
    """One key. `part` is the form of what it holds, or of each of it, where that is an object with keys of its own.

    `steady`: it stays what it is until the readings of the slow tier are taken anew.
    """

    name: str
    meaning: str
    read: Callable[[Subject], Any]
    always: bool = False
    part: Form[Any] | None = None
    steady: bool = False


class Form(Generic[Subject]):
    """The keys of an object, in their order."""

    def __init__(self, title: str, about: str, keys: Iterable[Key[Subject]]) -> None:
        self.title = title
        self.about = about
        self.keys = tuple(keys)
        self._rows = tuple((key.name, key.read, key.always) for key in self.keys)

    def write(self, subject: Subject) -> Json:
        """Return a subject as JSON has it, without what is not known."""
        found: Json = {}
        for name, read, always in self._rows:
            value = read(subject)
            if type(value) is float:
                value = plain(value)
            if always or value or (value is not None and type(value) not in _CONTAINERS):
                found[name] = value
        return found

    def parts(self) -> Iterable[Form[Any]]:
        """Give this form and all that are in it, each once."""
        found: dict[int, Form[Any]] = {id(self): self}
        for key in self.keys:
            if key.part is not None:
                found |= {id(each): each for each in key.part.parts()}
        return found.values()


def plain(value: float) -> float | None:
    """Return a number as it is to be read: whole where it is, else of six digits; None where it is none."""
    if value.is_integer():
        return int(value)
    return round(value, _DIGITS) if -_INFINITE < value < _INFINITE else None


def flag(value: Reading) -> bool | None:
    """Return a reading of 0 or 1 as what it is."""
    return None if value is None else bool(value)


def by_label(reading: Any) -> dict[str, float]:
    """Return a reading of one label as an object with a key for each of its values."""
    if not isinstance(reading, Mapping):
        return {}
    numbers = ((labels[0], value if type(value) is int else plain(value)) for labels, value in reading.items())
    return {name: number for name, number in numbers if number is not None}


def active(reading: Any) -> list[str]:
    """Return those values of a label that are 1."""
    return [labels[0] for labels, value in reading.items() if value] if isinstance(reading, Mapping) else []


def said(row: Metric[Any]) -> str:
    """Return the meaning of a key that is a metric of the page too."""
    return f"{row.help} `{row.name}`."


def joined(*objects: Json | Written) -> Written:
    """Write objects, none of them empty, as one."""
    return Written(f"{{{','.join([_text(each)[1:-1] for each in objects])}}}")


def listed(values: Iterable[Written]) -> Written:
    """Write a list."""
    return Written(f"[{','.join(values)}]")


def as_json(answer: Json) -> bytes:
    """Write an answer in one line."""
    pairs = [f"{_encode(name)}:{_text(value)}" for name, value in answer.items()]
    return f"{{{','.join(pairs)}}}\n".encode()


def _text(value: Any) -> str:
    return value if type(value) is Written else _encode(value)
