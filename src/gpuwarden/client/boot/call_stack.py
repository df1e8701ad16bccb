"""Call stack of a step, to leave out the steps that are a part of another one."""

from __future__ import annotations

from types import CodeType, FrameType

_KERAS = ("/keras/src/", "/tf_keras/src/")


def is_within(frame: FrameType | None, outer: CodeType | None = None) -> bool:
    """Return whether a frame runs within a fit of Keras, whose callback counts its steps, or within `outer`."""
    while frame is not None:
        code = frame.f_code
        if code is outer or (code.co_name == "fit" and any(path in code.co_filename for path in _KERAS)):
            return True
        frame = frame.f_back
    return False
