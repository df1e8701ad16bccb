"""A process that reports as a run does, by the client's own code, and follows lines of JSON on standard input.

Started with the socket, a name and devices as JSON. A line sets fields of the next reports; `error` sends an error,
`end` is the interpreter's exit. It writes a line back once it has reported what a line said.
"""

from __future__ import annotations

import json
import select
import sys
import time
from typing import Any

from gpuwarden.client.reporter import Reporter, join_run
from gpuwarden.protocol.messages import Allocation, DeviceMemory, Error, Hello

INTERVAL_SECONDS = 0.05


class FixedMemory:
    """Memory that a framework would report."""

    def __init__(self) -> None:
        self.devices: dict[str, DeviceMemory] = {}

    def sample(self) -> None:
        """Do nothing."""

    def latest(self) -> dict[str, DeviceMemory]:
        """Return the last figures."""
        return self.devices


def apply_line(run: Reporter, memory: FixedMemory, said: dict[str, Any]) -> None:
    """Apply a line of input."""
    for device, numbers in said.pop("memory", {}).items():
        memory.devices[device] = DeviceMemory(*numbers)
    if steps := said.pop("steps", 0):
        run.add_executions([steps * said.pop("seconds", 0.1)], steps)
    if waited := said.pop("input", None):
        run.state.input_wait_seconds, run.state.input_observed_seconds = waited
    if error := said.pop("error", None):
        allocations = tuple(Allocation(**each) for each in error.pop("allocations", ()))
        run.report_error(Error(phase=run.state.phase, steps=run.state.steps, allocations=allocations, **error))
    for name, value in said.items():
        setattr(run.state, name, value)


def main() -> None:
    """Report until the line with `end`."""
    socket, name, devices = sys.argv[1:4]
    run = join_run(socket, Hello(name, "test 1.0", json.loads(devices)))
    memory = FixedMemory()
    run.memory = memory  # type: ignore[assignment] # stands in for a framework
    while True:
        line = sys.stdin.readline() if select.select([sys.stdin], [], [], INTERVAL_SECONDS)[0] else ""
        said = json.loads(line) if line else {}
        if said.pop("end", False):
            return
        apply_line(run, memory, said)
        run.report(time.monotonic())
        if line:
            sys.stdout.write("done\n")
            sys.stdout.flush()


main()
