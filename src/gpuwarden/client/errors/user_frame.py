"""Innermost frame of the user's own code around an exception: file, line and function, as text.

No frame is kept, and no local variable is read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from types import CodeType, FrameType, TracebackType

from gpuwarden.protocol.messages import MAX_FRAME_CHARACTERS
from gpuwarden.protocol.validators import clip

MAX_CALLERS = 400  # frames around the one that caught the exception
_INSTALLED = ("/site-packages/", "/dist-packages/")
# AutoGraph runs a copy of the user's function; the text of the error, or its caller, names the original.
_GENERATED = ("<frozen ", "<__array_function__", "<attrs generated", "__autograph_generated_file")
_FRAME_IN_TEXT = r'\bFile "([^"\n]+)", line (\d+), in (\S+)'
# The standard library, where a virtual environment has another path too, and gpuwarden's own files.
_LIBRARIES = tuple(f"{folder}{os.sep}" for folder in (Path(os.__file__).parent, Path(__file__).parents[2]))


def find_user_frame(text: str, *exceptions: BaseException) -> str | None:
    """Return the frame as "train.py:12 in main": the innermost that the text names, else that of the first exception.

    Only the text has it where other frames than those of the traceback failed: an operation of a compiled step, a
    Python function or generator that tf.data calls, a torch worker.
    """
    named = reversed(re.findall(_FRAME_IN_TEXT, text))
    raised = ((code.co_filename, line, code.co_name) for each in exceptions for code, line in _walk(each.__traceback__))
    for file, line, function in chain(named, raised):
        if is_user_code(file):
            name = "" if function == "<module>" else f" in {function}"
            # A long path is cut at its front: the file's name and line are at its end.
            return clip(f"{file}:{line}{name}"[-MAX_FRAME_CHARACTERS:], MAX_FRAME_CHARACTERS)
    return None


def _walk(trace: TracebackType | None) -> Iterator[tuple[CodeType, int]]:
    """Yield the frames of a traceback, the innermost first, then those that called it: they are not unwound yet."""
    if trace is None:
        return
    caller: FrameType | None = trace.tb_frame.f_back
    inner: list[TracebackType] = []
    while trace is not None:
        inner.append(trace)
        trace = trace.tb_next
    for each in reversed(inner):
        yield each.tb_frame.f_code, each.tb_lineno
    for _ in range(MAX_CALLERS):
        if caller is None:
            return
        yield caller.f_code, caller.f_lineno or 0
        caller = caller.f_back


def is_user_code(file: str) -> bool:
    """Return whether a file is the user's: not an installed package, the standard library, or generated code."""
    plain = file.replace("\\", "/")
    if any(each in plain for each in (*_INSTALLED, *_GENERATED)):
        return False
    return not file.startswith(_LIBRARIES)
