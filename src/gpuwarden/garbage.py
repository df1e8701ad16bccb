"""Memory that Python gives back in a full collection alone, which it puts off for hours in a process that idles.

nvidia-ml-py makes a type for each length of a process list, and a type is garbage only a collection finds; freed tuples
are kept for later by the thousand. Measured over five hours' worth of jobs, both together took 5 MiB.
"""

from __future__ import annotations

import gc

from gpuwarden import malloc

BURST = 50_000  # objects made and not freed, before Python collects by itself; by default 700


class Garbage:
    """Has Python collect everything once in a while. Used by one thread; a collection takes about half a millisecond.

    For that, what there is when this is made counts as needed for good: a collection need not look at every module.
    A poll of many runs makes thousands of objects before it frees the last poll's: Python took that for garbage, looked
    through all that is known of the runs, and found nothing; with 500 runs that was a ninth of all CPU time.
    """

    interval = 60.0  # seconds

    def __init__(self, now: float) -> None:
        gc.collect()
        gc.freeze()
        gc.set_threshold(BURST)
        malloc.trim()
        self._due = now + self.interval

    def collect(self, now: float) -> None:
        """Collect, if it is time; `now` is monotonic."""
        if now >= self._due:
            self._due = now + self.interval
            gc.collect()
            malloc.trim()
