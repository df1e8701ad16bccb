"""Environment of a program whose training is watched without a change to it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from gpuwarden.protocol.run_folder import FOLDER_VARIABLE, NAME_VARIABLE, RUN_VARIABLE

# The first folder of PYTHONPATH: Python runs the sitecustomize.py in it, which waits for a framework to be imported.
_SITE = Path(__file__).parents[1] / "client" / "boot" / "site"


def make_environment(folder: Path, socket: Path | None, name: str | None, *, census: bool) -> dict[str, str]:
    """Return a program's environment; its processes leave notes in `folder`, and report to `socket` as `name`.

    With `census` they look for what keeps their tensors, when memory leaks or runs short.
    """
    paths = [str(_SITE), *filter(None, [os.environ.get("PYTHONPATH")])]
    changed = {
        **_inherited_environment(),
        "PYTHONPATH": os.pathsep.join(paths),
        RUN_VARIABLE: "1",
        FOLDER_VARIABLE: str(folder),
        "GPUWARDEN_SUMMARY": "0",  # the card has it
    }
    if socket is not None:
        changed["GPUWARDEN_SOCKET"] = str(socket)
    if name is not None:
        changed[NAME_VARIABLE] = name
    if census:
        changed["GPUWARDEN_CENSUS"] = "1"
    return changed


def _inherited_environment() -> dict[str, str]:
    """Return this process's environment, without the LC_CTYPE that Python adds where there is no locale (PEP 538)."""
    inherited = dict(os.environ)
    with contextlib.suppress(OSError):  # no /proc
        if b"\0LC_CTYPE=" not in b"\0" + Path("/proc/self/environ").read_bytes():
            inherited.pop("LC_CTYPE", None)
    return inherited
