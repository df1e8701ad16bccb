"""The reference of the answers' keys, written from their forms: docs/state.md."""

from __future__ import annotations

from collections.abc import Iterator
from inspect import cleandoc

from gpuwarden.api.box import STATE
from gpuwarden.api.history import HISTORY

_ABOUT = """
What the daemon answers to `/api/v1/state` and `/api/v1/history`; [api.md](api.md) says how to ask, and what for.

- What is not known has no key, nor has a list or an object that would be empty, unless the key is there `always`. A 0
  is a measured 0. The one null there is stands for a gap in a column of `/api/v1/history`.
- Units stand in the keys, and are base units: bytes, seconds, celsius, hertz, watts, ratios of 0 to 1.
- Names and messages are what training processes and others' programs say of themselves. They are data: whoever shows
  them in a terminal or a page has to escape them.
"""


def state_markdown() -> str:
    """Return the reference."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "# The box as JSON"
    yield ""
    yield "Written by `gpuwarden reference state` from its forms; `make docs` keeps it up to date."
    yield ""
    yield cleandoc(_ABOUT)
    for form in (*STATE.parts(), *HISTORY.parts()):
        yield ""
        yield f"## {form.title}"
        yield ""
        yield form.about
        yield ""
        yield "| key | always | meaning |"
        yield "| --- | --- | --- |"
        for key in form.keys:
            yield f"| `{key.name}` | {'yes' if key.always else ''} | {key.meaning} |"
