"""Names from which the census walks: those of the program's own modules, then the local variables of all threads."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from types import CodeType, FrameType, ModuleType
from typing import Any, NamedTuple

from gpuwarden.client.errors.user_frame import is_user_code

MAX_FRAMES = 400  # of a thread
OWN_REFERENCES = 3  # to a frame's snapshot of locals: the frame's, a variable, and getrefcount's argument
_CO_OPTIMIZED = 1  # locals are no dictionary: a function's, not a module's or class's (inspect.CO_OPTIMIZED)
_OWN = f"{__name__.partition('.')[0]}."


class Root(NamedTuple):
    """Name and its value; `code` is the function's whose local variable it is. `is_user`: the file is the user's."""

    name: str
    value: Any
    file: str
    code: CodeType | None = None
    is_user: bool = True


def list_roots() -> Iterator[Root]:
    """Yield the names of the program's modules, then the locals of its functions, then those of libraries'."""
    for file, names in _list_user_modules():
        yield from (Root(name, value, file) for name, value in tuple(names.items()) if not str(name).startswith("__"))
    if sys.gettrace() is not None or threading.gettrace() is not None:
        return  # under a debugger, reading a frame's locals can change them (before Python 3.13)
    frames = [frame for frame in _list_frames() if frame.f_code.co_flags & _CO_OPTIMIZED]
    for is_user in (True, False):
        for frame in frames:
            code = frame.f_code
            if is_user_code(code.co_filename) == is_user and frame.f_trace is None:
                for name, value in read_locals(frame).items():
                    yield Root(name, value, code.co_filename, code, is_user)


def read_module_dict(module: ModuleType) -> dict[str, Any]:
    """Return a module's dictionary; a lazy module is not loaded by that."""
    names: dict[str, Any] = object.__getattribute__(module, "__dict__")
    return names


def is_a(found: Any, *types: type) -> bool:
    """Return whether an object is an instance of one of the types; isinstance() may run the program's __class__."""
    return issubclass(type(found), types)


def is_user_module(module: Any) -> bool:
    """Return whether a module is the program's own: __main__, or of a file outside the installed packages."""
    if not is_a(module, ModuleType):
        return False
    names = read_module_dict(module)
    file = names.get("__file__")
    return names.get("__name__") == "__main__" or (isinstance(file, str) and is_user_code(file))


def _list_user_modules() -> Iterator[tuple[str, dict[str, Any]]]:
    seen: set[int] = set()  # __main__ of a multiprocessing child has two names
    for module in tuple(sys.modules.values()):
        if is_user_module(module):
            names = read_module_dict(module)
            if id(names) not in seen:
                seen.add(id(names))
                yield str(names.get("__file__") or ""), names


def _list_frames() -> Iterator[FrameType]:
    """Yield the frames of all threads, the innermost first, without gpuwarden's own."""
    for innermost in tuple(sys._current_frames().values()):  # noqa: SLF001 - documented, for debuggers
        frame: FrameType | None = innermost
        for _ in range(MAX_FRAMES):
            if frame is None:
                break
            if not str(frame.f_globals.get("__name__", "")).startswith(_OWN):
                yield frame
            frame = frame.f_back


def read_locals(frame: FrameType) -> dict[str, Any]:
    """Return a copy of a function's local variables, and leave the frame as it was.

    Before Python 3.13 `f_locals` is a snapshot that the frame keeps, and that would keep the values alive after the
    program has dropped them. Where the program holds it too, from its own `locals()`, it is brought up to date, as by
    any other call of that, and stays.
    """
    names = frame.f_locals
    found = dict(names)
    if sys.version_info < (3, 13) and sys.getrefcount(names) <= OWN_REFERENCES:
        code = frame.f_code
        for name in (*code.co_varnames, *code.co_cellvars, *code.co_freevars):
            names.pop(name, None)
    return found
