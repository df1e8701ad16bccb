"""Accuracy of headroom at real out-of-memory errors: `python bench/headroom.py` prints a Markdown table; 8 minutes.

The allocator is TensorFlow's for GPUs, on the CPU, with a limit of 256 MiB; the daemon is the real one with a poll per
second, on the mock driver, which reports for the process what a real one would: the allocator's pool as in its own
log, plus what a context and libraries used on an H200. Each case is a process.

The true headroom is the allocator's limit less the bytes in use when the request failed, to the byte. "Reported" is the
daemon's figure with the error: the last poll's headroom, less what the run allocated since; "minimum" uses the peak in
place of the bytes in use, which the failed step may have reached.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess  # noqa: TID251 - a benchmark starts the programs that it measures
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headroom_runs import CASES, LIMIT_MIB, MIB, pool_of

from mocked import mock
from programs import GPUWARDEN, conditions

CONTEXT_BYTES = 626 * MIB  # the context, cuBLAS and cuDNN of a JAX run on an H200 (docs/understand/headroom.md)
MODES = ("limit", "preallocation", "growth", "growth, pool reported")
PATIENCE = 120.0  # seconds; the allocator itself hopes for ten
HERE = Path(__file__).parent
SAMPLE = re.compile(r"^gpuwarden_run_memory_headroom_bytes\{.*\} (\S+)$", re.MULTILINE)
IN_STEP = re.compile(r"^gpuwarden_run_memory_headroom_in_step_bytes\{.*\} (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Out-of-memory error in bytes: headroom at the poll before, reported with the error, its minimum; the truth.

    `in_step` is what the last steps left, at the poll before.
    """

    polled: float | None
    in_step: float | None
    reported: float | None
    least: float | None
    left: int
    asked: int

    @property
    def error(self) -> float | None:
        """Bytes by which the reported headroom was too high."""
        return None if self.reported is None else self.reported - self.left


class Daemon:
    """Daemon with one mock GPU."""

    def __init__(self, folder: Path) -> None:
        self._mock = mock(folder)
        self.socket = folder / "run.sock"
        self._log = folder / "daemon.log"
        config = folder / "config.yaml"
        config.write_text("runs: {trust_reports: true}\n")  # in the mode "limit" the driver lists no process
        self._command = [*GPUWARDEN, "serve", "--listen=127.0.0.1:0", f"--socket={self.socket}", f"--config={config}"]
        self._env = {**os.environ, **self._mock.env(gpus=1), "STATE_DIRECTORY": str(folder / "state")}

    @contextmanager
    def running(self) -> Iterator[Daemon]:
        """Run it."""
        with self._log.open("wb") as log, subprocess.Popen(self._command, env=self._env, stdout=log, stderr=log) as it:
            try:
                yield self
            finally:
                it.kill()

    def say(self, pid: int, pool: int, mode: str) -> None:
        """Let the driver report a process with such a pool on a device no larger than the allocator's limit."""
        if mode == "limit":
            return  # nothing of the process
        if mode == "preallocation":
            pool = LIMIT_MIB * MIB
        free = LIMIT_MIB - round(pool / MIB)
        self._mock.control(f"procs 0 {pid}:{pool + CONTEXT_BYTES}B", f"set 0 free {max(free, 0)}")

    def url(self) -> str:
        """Return its URL; empty until it listens."""
        found = re.findall(r"metrics (http://\S+)/metrics", self._log.read_text())
        return found[-1] if found else ""

    def page(self, path: str) -> str:
        """Return a page; empty without an answer."""
        try:
            with urllib.request.urlopen(f"{self.url()}{path}", timeout=5) as answer:
                return str(answer.read().decode())
        except (OSError, ValueError, urllib.error.URLError):
            return ""


def uuid_of(daemon: Daemon) -> str:
    """Return the GPU's UUID once it was polled."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if found := re.search(r'gpuwarden_gpu_up\{uuid="([^"]+)"\} 1', daemon.page("/metrics")):
            return found[1]
        time.sleep(0.1)
    raise TimeoutError("the daemon has no GPU")


def failed(daemon: Daemon) -> dict[str, Any] | None:
    """Return the out-of-memory error that the run has reported, or None."""
    runs = json.loads(daemon.page("/api/v1/runs") or '{"live": []}')["live"]
    errors = [error for run in runs for error in run.get("errors_told", ())]
    return errors[0] if errors else None


def follow(
    daemon: Daemon, run: subprocess.Popen[str], log: Path, mode: str
) -> tuple[float | None, float | None, dict[str, Any]]:
    """Let the driver follow the run's pool until its out-of-memory error.

    Return the headroom at the poll before it, what the steps left then, and the error.
    """
    polled, in_step, pool, error = None, None, -1, None
    end = time.monotonic() + PATIENCE
    while error is None:
        if time.monotonic() > end or run.poll() is not None:
            raise RuntimeError(f"no out-of-memory: {log.read_text(errors='replace')[-2000:]}")
        if (now := pool_of(log)) != pool:
            pool = now
            daemon.say(run.pid, pool, mode)
        page = daemon.page("/metrics")
        found, within = SAMPLE.search(page), IN_STEP.search(page)
        error = failed(daemon)  # asked afterwards: a page of before it is from a poll of before it
        if error is None and found:
            polled, in_step = float(found[1]), float(within[1]) if within else None
        time.sleep(0.02)
    return polled, in_step, error


def outcome(name: str, mode: str) -> Outcome:
    """Play a case."""
    with tempfile.TemporaryDirectory() as place:
        folder, log = Path(place), Path(place) / "run.log"
        with Daemon(folder).running() as daemon:
            command = [sys.executable, str(HERE / "headroom_runs.py"), name, mode, uuid_of(daemon), str(log)]
            env = {**os.environ, "GPUWARDEN_SOCKET": str(daemon.socket)}
            with (
                log.open("wb") as errors,
                subprocess.Popen(
                    command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
                ) as run,
            ):
                try:
                    polled, in_step, error = follow(daemon, run, log, mode)
                    assert run.stdout is not None
                    true = json.loads(run.stdout.readline())
                finally:
                    run.kill()
    reported, least = (
        next(iter(error.get(key, {}).values()), None) for key in ("headroom_bytes", "least_headroom_bytes")
    )
    return Outcome(polled, in_step, reported, least, LIMIT_MIB * MIB - true["in_use"], true["asked"])


def row(mode: str, name: str, found: Outcome) -> str:
    """Print a case in MiB."""
    figures = (found.asked, found.polled, found.in_step, found.reported, found.least, found.left, found.error)
    return f"| {mode} | {name} | " + " | ".join("" if each is None else f"{each / MIB:.1f}" for each in figures) + " |"


def main() -> None:
    """Play all cases and print them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a smoke run: one case in one mode")
    quick = parser.parse_args().quick
    print(f"{conditions()}; MiB.\n")
    print("| mode | case | asked | at the poll | in the step | reported | minimum | truly left | error |")
    print("| --- | --- | --: | --: | --: | --: | --: | --: | --: |")
    for mode in MODES[-1:] if quick else MODES:
        for name in ["leak"] if quick else CASES:
            print(row(mode, name, outcome(name, mode)), flush=True)


if __name__ == "__main__":
    main()
