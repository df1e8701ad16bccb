"""Whether a message waits at a socket, asked without letting go of the interpreter.

Python's own calls let other threads run meanwhile and then wait for their turn: 5 ms beside one that computes in
Python, as a loader may. That would be too much for a question that is asked all the time.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from functools import partial

try:
    import ctypes
except ImportError:  # a Python that was built without it
    ctypes = None  # type: ignore[assignment]

_FLAGS = socket.MSG_DONTWAIT | socket.MSG_PEEK | socket.MSG_TRUNC  # TRUNC: how long it is, though none of it is copied


def _prepared() -> Callable[[int], Callable[[], int]]:
    try:
        recv = ctypes.PyDLL(None).recv
    except (AttributeError, OSError):  # no ctypes, or a program that was linked without a loader
        return lambda number: partial(_ask_slowly, number)
    recv.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    recv.restype = ctypes.c_ssize_t
    return lambda number: partial(recv, number, None, 0, _FLAGS)


def _ask_slowly(number: int) -> int:
    borrowed = socket.socket(fileno=number)
    try:
        return len(borrowed.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK))
    except OSError:
        return -1
    finally:
        borrowed.detach()


# Takes the number of a socket and gives the question, for good: asking it runs nothing of Python's. The answer is 0 at
# the socket's end, above it where a message waits, else below.
question = _prepared()


def gone() -> int:
    """Answer for a socket that there is no more."""
    return 0
