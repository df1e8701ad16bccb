"""Exception that ends the interpreter, and its error message if it was not reported when raised.

Frameworks raise outside of the patched functions too: while they build a model, or later, when a result is read that a
device could not compute.
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
    """Return whether this is an error, and not the end of data, an interrupt or an exit."""
    return isinstance(error, Exception) and not is_end_of_data(error)


def find_uncaught_type() -> str | None:
    """Return the name of the type of the exception that ends the interpreter; None if none does.

    The interpreter stores the last exception it printed. So do programs that continue after one: Python's prompt and
    IPython, which set sys.ps1, and others, whose frames are below the exception's.
    """
    kind, trace = getattr(sys, "last_type", None), getattr(sys, "last_traceback", None)
    if kind is None or hasattr(sys, "ps1") or (trace is not None and trace.tb_frame.f_back is not None):
        return None
    return str(kind.__name__)


def error_from_uncaught(last: Error | None, phase: Phase, steps: int, memory: dict[str, DeviceMemory]) -> Error | None:
    """Return the error message for the exception that ends the interpreter; None if it is no error or was reported.

    `last` is the last reported error, compared by kind and text, since no exception is kept. An exception that was
    raised from a reported one counts as reported.
    """
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)  # last_exc from Python 3.12 on
    if find_uncaught_type() is None or not isinstance(error, BaseException) or not is_error(error):
        return None
    chain: list[BaseException] = [error]
    while chain[-1].__cause__ is not None and len(chain) < _MAX_CAUSES:
        chain.append(chain[-1].__cause__)
    found = [error_from_exception(each, phase, steps, memory) for each in chain]
    reported = last is not None and any((each.kind, each.text) == (last.kind, last.text) for each in found)
    return None if reported else found[0]
