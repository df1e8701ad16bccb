"""Process that polls the mock library through the real binding on request, on a clock that the test moves."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from commands import fork_with_input
from simulated_box import Clock

from gpuwarden.gpu.poller import Poller
from gpuwarden.gpu.reader import DEFAULT_PLAN, Plan
from gpuwarden.gpu.snapshot import Snapshot
from gpuwarden.nvml.driver import binding

SLOW = DEFAULT_PLAN.slow_interval
PATIENCE_SECONDS = 0.5  # that a call which hangs is waited for


def json_from_snapshot(snapshot: Snapshot) -> list[dict[str, Any]]:
    """Return each GPU in JSON types; labels come after the metric's name."""
    return [
        {
            "uuid": gpu.identity.uuid,
            "fault": gpu.fault,
            "errors": dict(gpu.errors),
            "readings": _readings(gpu.readings),
            "processes": [[p.pid, p.memory, p.instance] for p in gpu.processes],
            "mig": {m.identity.uuid: _readings(m.readings) | {"profile": m.identity.profile} for m in gpu.mig},
        }
        for gpu in snapshot.gpus
    ]


def _readings(readings: Mapping[Any, Any]) -> dict[str, float]:
    found: dict[str, float] = {}
    for row, reading in readings.items():
        for labels, value in reading.items() if isinstance(reading, Mapping) else (((), reading),):
            if value is not None:
                found[" ".join((row.name.removeprefix("gpuwarden_"), *labels))] = value
    return found


class PolledDriver:
    """The process from outside."""

    def __init__(self, env: Mapping[str, str], opted_in: frozenset[str]) -> None:
        reader, writer = os.pipe()
        self._answers = os.fdopen(reader, encoding="utf-8")
        ours = Path(f"/proc/{os.getpid()}/fd")
        environment = {**os.environ, **env}
        self._process = fork_with_input(list(opted_in), ours / str(writer), ours / "2", environment, __file__)
        os.close(writer)  # now only the process has it: its end is the end of the answers

    def poll(self, later: float = 0.0) -> list[SimpleNamespace]:
        """Poll that many seconds after the last one; return the GPUs."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{later}\n".encode())
        self._process.stdin.flush()
        answer = self._answers.readline()
        assert answer, "the process has ended"
        return [SimpleNamespace(**gpu) for gpu in json.loads(answer)]

    def stop(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._answers.close()


@contextmanager
def run_polled_driver(env: Mapping[str, str], *opted_in: str) -> Iterator[PolledDriver]:
    """Start a process and end it."""
    driver = PolledDriver(env, frozenset(opted_in) if opted_in else DEFAULT_PLAN.opted_in)
    try:
        yield driver
    finally:
        driver.stop()


async def _serve(opted_in: frozenset[str]) -> None:
    clock = Clock()
    poller = Poller(binding(), PATIENCE_SECONDS, plan=Plan(SLOW, opted_in), clock=clock)
    while line := await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline):
        clock.sleep(float(line))
        print(json.dumps(json_from_snapshot(await poller.poll())), flush=True)  # noqa: T201 - the test reads it


if __name__ == "__main__":
    asyncio.run(_serve(frozenset(sys.argv[1:])))
