"""Report of a program that runs out of memory before its first fit, while Keras makes a model or an optimizer.

No hook of a callback has been called by then, and often no callback exists: so it is reported when the interpreter
exits.
"""

from __future__ import annotations

import atexit
import contextlib
import os
from collections.abc import Callable

from gpuwarden.client.errors.uncaught import error_from_uncaught
from gpuwarden.client.reporter import has_reported


def report_early_oom(report: Callable[[], object]) -> None:
    """Call `report` at exit if an out-of-memory of the framework ends this program and it has never reported."""
    process = os.getpid()  # forked children are left out: they use the parent's model

    def report_at_exit() -> None:
        if os.getpid() != process or has_reported():
            return
        with contextlib.suppress(Exception):  # no internal failure may show at a program's end
            error = error_from_uncaught(None, "idle", 0, {})
            # Other errors are not reported: the framework may not be set up, and listing its devices would do that.
            if error is not None and error.allocations:
                report()

    atexit.register(report_at_exit)
