"""Memory that Python gives back in a full collection alone, which it puts off for hours in a process that idles.

nvidia-ml-py makes a type for each length of a process list, and a type is garbage only a collection finds; freed tuples
are kept for later by the thousand. Measured over five hours' worth of jobs, both together took 5 MiB.
"""

from __future__ import annotations

import gc
import time

from gpuwarden import malloc

PER_RUN = 100  # objects that a poll makes and frees only with the next one's, of a run


class Garbage:
    """Has Python collect everything once in a while. Used by one thread; a collection takes about half a millisecond.

    For that, what there is when this is made counts as needed for good: a collection need not look at every module. But
    it looks at all that is known of the runs, of 500 for a tenth of a second: the longer it takes, the later the next.
    What Python's own collections, after 700 objects, find sooner it leaves to them: faults of a driver leave much.
    """

    interval = 60.0  # seconds, or
    share = 0.0005  # of a core, but
    longest_interval = 600.0  # at most

    def __init__(self, now: float) -> None:
        gc.collect()
        gc.freeze()
        malloc.trim()
        self._usual, *self._older = gc.get_threshold()
        self._due = now + self.interval

    def collect(self, now: float, runs: int) -> None:
        """Collect, if it is time; `now` is monotonic, `runs` how many there are.

        Python takes what a poll makes of many runs, before it frees the last one's, for garbage, and looks in vain
        through all that is known of them: with 500 runs that was a ninth of all CPU time. So it is to wait longer.
        """
        gc.set_threshold(max(self._usual, PER_RUN * runs), *self._older)
        if now >= self._due:
            began = time.thread_time()
            gc.collect()
            malloc.trim()
            took = time.thread_time() - began  # and not by the clock: others may have had the processor
            self._due = now + min(max(self.interval, took / self.share), self.longest_interval)
