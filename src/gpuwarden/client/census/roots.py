"""Names from which the census walks: those of the program's own modules, then local variables.

These are of all threads, and of the functions that an exception has left: it keeps their variables until it is dropped.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from functools import partial
from importlib.machinery import SourceFileLoader
from types import CodeType, FrameType, ModuleType
from typing import Any, NamedTuple

from gpuwarden.client.errors.user_frame import is_user_code

MAX_FRAMES = 400  # of a thread, or of the exceptions
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
    found = dict.fromkeys((*_list_frames(), *_list_left_frames()))
    frames = [frame for frame in found if frame.f_code.co_flags & _CO_OPTIMIZED]
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
    file = find_file(names)
    return names.get("__name__") == "__main__" or (file != "" and is_user_code(file))


def find_file(names: dict[str, Any]) -> str:
    """Return the file of a module's dictionary, "" if there is none."""
    file, loader = names.get("__file__"), names.get("__loader__")
    if file is None and type(loader) is SourceFileLoader:  # a script's __file__ is deleted before exit handlers
        file = loader.path
    return file if isinstance(file, str) else ""


def _list_user_modules() -> Iterator[tuple[str, dict[str, Any]]]:
    seen: set[int] = set()  # __main__ of a multiprocessing child has two names
    for module in tuple(sys.modules.values()):
        if is_user_module(module):
            names = read_module_dict(module)
            if id(names) not in seen:
                seen.add(id(names))
                yield find_file(names), names


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


def _list_left_frames() -> Iterator[FrameType]:
    """Yield the frames of the exception in progress and of the last uncaught one, each after those raised before it."""
    left: list[Any] = [sys.exc_info()[1], getattr(sys, "last_value", None)]
    seen: set[int] = set()
    while left and len(seen) < MAX_FRAMES:
        each = left.pop()
        if is_a(each, BaseException) and id(each) not in seen:
            seen.add(id(each))
            read = partial(BaseException.__getattribute__, each)  # the program's class may have its own
            left += [read("__context__"), read("__cause__")]
            trace = read("__traceback__")
            while trace is not None and len(seen) < MAX_FRAMES:
                seen.add(id(trace))
                yield trace.tb_frame
                trace = trace.tb_next


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
