"""This process as one training run: its totals, and when they are reported."""

from __future__ import annotations

import atexit
import os
import sys
import time
from bisect import bisect_left
from collections.abc import Callable
from pathlib import Path

from gpuwarden.client.connection import Connection
from gpuwarden.client.memory import Memory
from gpuwarden.protocol import STEP_BUCKETS, End, Hello, Phase, Report, clip

DEFAULT_SOCKET = "/run/gpuwarden/run.sock"
END_WAIT = 0.1  # seconds that the interpreter's exit may be held for the last messages
REPORT_INTERVAL = 0.25  # seconds
LOOK_INTERVAL = 0.25  # seconds; a look takes some 50 µs where training has the processor's caches

_runs: dict[tuple[int, str], Run] = {}


class Run:
    """The totals of this process since it first reported; one a process and socket, whoever counts into it.

    Whoever makes steps calls `observe` once `due` has come; whoever changes `phase` or `epoch` calls `report`.
    """

    def __init__(self, connection: Connection) -> None:
        self.phase: Phase = "idle"
        self.epoch: int | None = None
        self.batch: int | None = None
        self.memory = Memory()
        self.interval = REPORT_INTERVAL
        self.due = 0.0  # monotonic
        self.settle: Callable[[], None] = lambda: None  # counts the steps that are only noted so far
        self.steps = 0
        self._step_seconds = 0.0
        self._buckets = [0] * (len(STEP_BUCKETS) + 1)
        self._connection = connection
        self._report_due = 0.0

    def introduce(self, hello: Hello) -> None:
        """Tell the daemon who reports, where that has changed."""
        self._connection.introduce(hello)

    def count(self, steps: int, seconds: float | None) -> None:
        """Add `steps` that took `seconds` together; None: how long is not known or not typical."""
        self.steps += steps
        if seconds is not None:
            self._step_seconds += seconds
            self._buckets[bisect_left(STEP_BUCKETS, seconds / steps)] += steps

    def observe(self, now: float) -> None:
        """Look at steps and memory, and report where the last report is `interval` old; `now` is monotonic."""
        self.due = now + min(LOOK_INTERVAL, self.interval)
        self.settle()
        self.memory.sample()
        if now >= self._report_due:
            self._send(now)

    def report(self, now: float) -> None:
        """Look and report at once; where the report does not go the next carries the same totals."""
        self.settle()
        self.memory.sample()
        self._send(now)

    def _send(self, now: float) -> None:
        self._report_due = now + self.interval
        self._connection.send(
            Report(
                phase=self.phase,
                steps=self.steps,
                step_seconds=self._step_seconds,
                step_buckets=tuple(self._buckets),
                memory=self.memory.reading(),
                epoch=self.epoch,
                batch=self.batch,
                dropped=self._connection.dropped,
            )
        )

    def end(self, reason: str) -> None:
        """Send the last totals and say goodbye; waits at most END_WAIT for a daemon that lags."""
        self._connection.wait_for_room(END_WAIT)
        self.phase = "idle"
        self.settle()
        # Memory is not asked: TensorFlow may be half gone, or locked for ever in a forked child that exits.
        self._send(time.monotonic())
        self._connection.send(End(clip(reason)))
        self._connection.close()


def join(path: str | None, hello: Hello) -> Run:
    """Give this process's run at the socket `path`, by default GPUWARDEN_SOCKET's, and tell the daemon `hello`."""
    path = path or os.environ.get("GPUWARDEN_SOCKET") or DEFAULT_SOCKET
    key = os.getpid(), path  # by process: a forked child that trains is a run of its own
    run = _runs.get(key)
    if run is None:
        run = _runs[key] = Run(Connection(path, hello))
        atexit.register(run.end, "exit")
    run.introduce(hello)
    return run


def default_name() -> str:
    """Name this process as its user would: by its script."""
    script = Path(sys.argv[0] if getattr(sys, "argv", None) else "").name
    if "ipykernel" in script or "colab_kernel" in script:
        return "notebook"
    return "python" if script in ("", "-c", "-") else script
