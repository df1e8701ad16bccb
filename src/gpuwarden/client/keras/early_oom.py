"""Report of a program that is out of memory before its first fit begins, as Keras makes a model or an optimizer.

No hook of a callback is called by then, and often there is none yet: so it is reported when the interpreter ends.
"""

from __future__ import annotations

import atexit
import contextlib
import os
from collections.abc import Callable

from gpuwarden.client.errors.uncaught import error_from_uncaught
from gpuwarden.client.reporter import has_reported


def report_early_oom(report: Callable[[], object]) -> None:
    """Call `report` if this program ends by an out-of-memory of its framework and has never reported."""
    process = os.getpid()  # a forked child that ends so has not made what its parent has

    def at_exit() -> None:
        if os.getpid() != process or has_reported():
            return
        with contextlib.suppress(Exception):  # whatever fails here must not show at a program's end
            error = error_from_uncaught(None, "idle", 0, {})
            # Others are not reported: the framework may not have begun, and asking for its devices would begin it.
            if error is not None and error.allocations:
                report()

    atexit.register(at_exit)
