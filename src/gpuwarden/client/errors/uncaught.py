"""Exception that ends the interpreter, and its report where it was not reported when it was raised.

Frameworks raise where no wrapper stands: as they build a model, or later, when a result is asked for that a device
could not compute.
"""

from __future__ import annotations

import sys

from gpuwarden.client.errors.classifier import error_from_exception
from gpuwarden.protocol.messages import DeviceMemory, Error, Phase

_MAX_CAUSES = 8


def is_end_of_data(error: BaseException) -> bool:
    """Return whether this is the end of an iterator or of a TensorFlow dataset, which raises OutOfRangeError."""
    # By name, since TensorFlow is not imported here.
    return isinstance(error, StopIteration | StopAsyncIteration) or any(
        each.__name__ == "OutOfRangeError" for each in type(error).__mro__
    )


def is_error(error: BaseException) -> bool:
    """Return whether this is an error and not a way to stop: the end of data, an interrupt, an exit."""
    return isinstance(error, Exception) and not is_end_of_data(error)


def find_uncaught_type() -> str | None:
    """Return the name of the type of the exception that ends the interpreter.

    The interpreter notes what it has just printed. So do those that go on after it: Python's prompt and IPython, which
    show themselves by sys.ps1, and others whose frames stand below the exception's.
    """
    kind, trace = getattr(sys, "last_type", None), getattr(sys, "last_traceback", None)
    if kind is None or hasattr(sys, "ps1") or (trace is not None and trace.tb_frame.f_back is not None):
        return None
    return str(kind.__name__)


def error_from_uncaught(last: Error | None, phase: Phase, steps: int, memory: dict[str, DeviceMemory]) -> Error | None:
    """Describe the exception that ends the interpreter, but for one that is no error or was reported as `last`.

    By kind and text, since no exception is kept; one that was raised from a reported one counts as reported.
    """
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)  # the one from Python 3.12 on
    if find_uncaught_type() is None or not isinstance(error, BaseException) or not is_error(error):
        return None
    chain: list[BaseException] = [error]
    while chain[-1].__cause__ is not None and len(chain) < _MAX_CAUSES:
        chain.append(chain[-1].__cause__)
    found = [error_from_exception(each, phase, steps, memory) for each in chain]
    reported = last is not None and any((each.kind, each.text) == (last.kind, last.text) for each in found)
    return None if reported else found[0]
