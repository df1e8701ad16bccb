"""Environment of a program whose training is watched without a change to it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from gpuwarden.protocol.run_folder import FOLDER_VARIABLE, RUN_VARIABLE

# The first folder of PYTHONPATH: Python runs the sitecustomize.py in it, which waits for a framework to be imported.
_SITE = Path(__file__).parents[1] / "client" / "boot" / "site"


def make_environment(folder: Path, socket: Path | None, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return a program's environment; its processes leave notes in `folder` and report to `socket`."""
    paths = [str(_SITE), *filter(None, [environ.get("PYTHONPATH")])]
    changed = {
        **environ,
        "PYTHONPATH": os.pathsep.join(paths),
        RUN_VARIABLE: "1",
        FOLDER_VARIABLE: str(folder),
    }
    return changed if socket is None else {**changed, "GPUWARDEN_SOCKET": str(socket)}
