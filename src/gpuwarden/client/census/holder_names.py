"""Names of holders: the path from a root to an object, as the program would write it, and the line that fills it."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import (
    AsyncGeneratorType,
    CellType,
    CodeType,
    CoroutineType,
    FunctionType,
    GeneratorType,
    MemberDescriptorType,
    MethodType,
)
from typing import Any

from gpuwarden.client.census.holder_walk import HolderWalk
from gpuwarden.client.census.roots import find_file, is_a, is_user_module, read_locals, read_module_dict
from gpuwarden.client.census.source_lines import Scope, find_lines

MAX_LINES = 2  # of one holder's place
MAX_SCANNED = 100_000  # entries of a container in which one is looked up
MAX_KEY_CHARACTERS = 30
_CACHED = type(lru_cache(lambda: None))
_FRAMES = {GeneratorType: "gi", CoroutineType: "cr", AsyncGeneratorType: "ag"}  # prefix of gi_frame and the like
_INSTANCE_NAMES = ("self", "cls")  # say less than the class's name


@dataclass(frozen=True, slots=True)
class Holder:
    """Name of a holder, such as "list `history`", and its place, such as "train.py:88"; "" where unknown."""

    text: str
    place: str = ""


@dataclass(slots=True)
class _Name:
    """Name under construction: its text, the last identifier, and where to look for that in the source."""

    text: str
    last: str
    file: str
    within: Scope | None = None  # the function whose local variable it is, or the class whose attribute
    suffix: str = ""  # " of train()"
    user_text: str = ""  # the same from the last object of the user's own class on

    def restart(self, text: str, file: str, code: CodeType | None) -> None:
        self.text = self.user_text = self.last = text
        self.file, self.within = file, code and code.co_firstlineno
        self.suffix = f" of {code.co_name}()" if code else ""

    def add_key(self, text: str) -> None:
        self.text += text
        self.user_text += text if self.user_text else ""

    def add_attribute(self, name: str, owner: type) -> None:
        self.text, self.last = f"{self.text}.{name}", name
        if (file := _find_file(owner)) is not None:
            self.user_text, self.file, self.within = f"{owner.__name__}.{name}", file, owner.__name__
        else:
            self.user_text += f".{name}" if self.user_text else ""
            self.within = None  # it is filled wherever the object is known


@dataclass(slots=True)
class HolderNames:
    """Names of the holders of one walk, each file read once."""

    walk: HolderWalk
    _lines: dict[tuple[str, str, Scope | None], list[int]] = field(default_factory=dict)

    def describe(self, place: int, *, with_line: bool) -> Holder:
        """Return the name of the object at a place of the walk."""
        path = self.walk.path(place)
        objects = [self.walk.objects[each] for each in path]
        root = self.walk.roots[path[0]]
        name = _Name(root.name, root.name, root.file if root.is_user else "")
        name.within = root.code and root.code.co_firstlineno
        name.suffix = f" of {root.code.co_name}()" if root.code else ""
        for number, found in enumerate(objects):
            if type(found) is _CACHED:
                code = getattr(found.__wrapped__, "__code__", None)
                return Holder(f"lru_cache of `{getattr(code, 'co_name', name.last)}`")
            if number + 1 < len(objects):
                _add_step(name, objects[: number + 1], objects[number + 1])
        holder = objects[-2] if len(objects) > 1 and _is_namespace_of(objects[-1], objects[-2]) else objects[-1]
        if name.user_text and (not root.is_user or root.name in _INSTANCE_NAMES):
            text, suffix = name.user_text, ""
        else:
            text, suffix = name.text, name.suffix
        kind = "" if is_a(holder, FunctionType, CellType) else f"{type(holder).__name__} "
        return Holder(f"{kind}`{text}`{suffix}", self._find_place(name) if with_line else "")

    def _find_place(self, name: _Name) -> str:
        if not name.file:
            return ""
        key = name.file, name.last, name.within
        if key not in self._lines:
            self._lines[key] = find_lines(*key)
        lines = self._lines[key]
        if not lines or len(lines) > MAX_LINES:
            return ""
        return f"{_shorten(name.file)}:{', '.join(map(str, lines))}"


def _add_step(name: _Name, above: list[Any], child: Any) -> None:
    """Extend a name by the step from the last of the objects `above` to `child`."""
    parent = above[-1]
    outer = above[-2] if len(above) > 1 else None
    if is_a(parent, dict):
        key = _find_key(dict.items(parent), child)
        if outer is not None and _is_namespace_of(parent, outer) and isinstance(key, str):
            name.add_attribute(key, outer if is_a(outer, type) else type(outer))
        else:
            name.add_key(f"[{_format_key(key)}]")
    elif is_a(parent, list, tuple, deque):
        if type(child) is CellType:
            _name_closure(name, above, child)
        elif not is_a(outer, FunctionType):
            index = _find_index(parent, child)
            name.add_key("[…]" if index is None else f"[{index}]")
    elif type(parent) in _FRAMES:
        frame = getattr(parent, f"{_FRAMES[type(parent)]}_frame")
        variable = None if frame is None else _find_key(read_locals(frame).items(), child)
        if isinstance(variable, str):
            name.restart(variable, frame.f_code.co_filename, frame.f_code)
    elif not is_a(parent, FunctionType, CellType, MethodType, set, frozenset):
        attribute = _find_attribute(parent, child)
        if attribute is not None:
            name.add_attribute(attribute, type(parent))


def _name_closure(name: _Name, above: list[Any], cell: Any) -> None:
    function = next((each for each in reversed(above) if is_a(each, FunctionType)), None)
    if function is None:
        return
    code = function.__code__
    for variable, each in zip(code.co_freevars, function.__closure__ or (), strict=False):
        if each is cell:
            name.restart(variable, code.co_filename, code)


def _is_namespace_of(names: Any, owner: Any) -> bool:
    """Return whether a dictionary holds the attributes of an object, which is found one step above."""
    if not is_a(names, dict) or is_a(owner, dict, list, tuple, set, frozenset, deque, CellType):
        return False
    if is_a(owner, type):
        return True  # the dictionary of a class has no other way to it than through the class
    return _read_dict(owner) is names


def _read_dict(owner: Any) -> Mapping[str, Any] | None:
    try:
        found = object.__getattribute__(owner, "__dict__")
    except AttributeError:
        return None
    return found if isinstance(found, dict) else None


def _find_attribute(owner: Any, child: Any) -> str | None:
    """Return the attribute of an object that is `child`: in its dictionary, or in a slot."""
    key = _find_key((_read_dict(owner) or {}).items(), child)
    if isinstance(key, str):
        return key
    for cls in type(owner).__mro__:
        for name, slot in tuple(cls.__dict__.items()):
            if type(slot) is MemberDescriptorType and name != "__dict__":
                try:
                    if slot.__get__(owner) is child:
                        return name
                except AttributeError:
                    continue
    return None


def _find_key(items: Iterable[tuple[Any, Any]], child: Any) -> Any:
    for number, (key, value) in enumerate(items):
        if value is child:
            return key
        if number > MAX_SCANNED:
            break
    return None


def _find_index(entries: Iterable[Any], child: Any) -> int | None:
    for index, each in enumerate(entries):
        if each is child:
            return index
        if index > MAX_SCANNED:
            break
    return None


def _format_key(key: Any) -> str:
    if type(key) not in (str, int, bool, float):  # no repr of the program's own
        return "…"
    text = repr(key)
    return text if len(text) <= MAX_KEY_CHARACTERS else "…"


def _find_file(owner: type) -> str | None:
    """Return the file of a class of the user's own; None for a library's."""
    module = sys.modules.get(str(type.__getattribute__(owner, "__module__")))
    return find_file(read_module_dict(module)) if module is not None and is_user_module(module) else None


def _shorten(file: str) -> str:
    """Return a path relative to the working directory if it lies there."""
    try:
        relative = os.path.relpath(file)
    except (OSError, ValueError):
        return file
    return file if relative.startswith("..") else relative
