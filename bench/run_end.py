"""How soon the daemon knows that a run has ended: `python bench/run_end.py` prints a Markdown table.

Real processes report to a real server of runs, whose event loop makes polls meanwhile as the daemon's does, with all
runs that live. They end one by one: by SIGKILL, by an exit without a goodbye, and by SIGKILL while a forked worker
still holds the connection. Time runs from just before the signal, or from what the process takes for the time just
before its exit, to when the registry has the ending. `--quick` is a smoke run.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import subprocess  # noqa: TID251 - starts the runs
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

from gpuwarden.gpu.snapshot import Snapshot
from gpuwarden.protocol import Hello, Message, encode
from gpuwarden.runs.peer import Peer
from gpuwarden.runs.registry import RunRegistry
from gpuwarden.runs.server import RunServer

BAR_MS = 100.0
POLL_SECONDS = 1.0
AT_ONCE = 20  # runs
LIMIT_SECONDS = 10.0  # for one end to be seen
HELLO = encode(Hello("bench", "none", {})).decode()
RUN = """
import os, socket, sys, time
run = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
run.connect(sys.argv[1])
run.send(sys.argv[2].encode())
worker = os.fork() if sys.argv[3] == "worker" else -1
if worker == 0:
    time.sleep(600)
    os._exit(0)
print(worker, flush=True)
sys.stdin.readline()
print(time.monotonic(), flush=True)
os._exit(0)
"""


class NotingRegistry(RunRegistry):
    """A registry that notes when it knows of an end, and tells of news."""

    def __init__(self) -> None:
        super().__init__(limit=512, expiry=120.0, overhead=0)
        self.known: dict[int, float] = {}  # monotonic, by pid
        self.news = asyncio.Event()

    def receive(self, peer: Peer, message: Message, now: float) -> None:
        """Take a message."""
        super().receive(peer, message, now)
        self.news.set()

    def exited(self, peer: Peer, now: float, status: int | None = None) -> None:
        """Take the end of a process."""
        super().exited(peer, now, status)
        self.known.setdefault(peer.pid, time.monotonic())
        self.news.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for news that make the condition true."""
        while not condition():
            self.news.clear()
            await asyncio.wait_for(self.news.wait(), LIMIT_SECONDS)


class Process:
    """One run. `worker` is the pid of a process that it forked; -1 for none."""

    def __init__(self, path: Path, way: str) -> None:
        command = [sys.executable, "-S", "-c", RUN, str(path), HELLO, way]
        self._popen = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.pid = self._popen.pid
        self.worker = int(self._line())

    def _line(self) -> str:
        assert self._popen.stdout is not None
        return self._popen.stdout.readline()

    def kill(self) -> float:
        """End it by SIGKILL; return the time before."""
        before = time.monotonic()
        self._popen.kill()
        return before

    def leave(self) -> float:
        """Have it exit; return the time before."""
        assert self._popen.stdin is not None
        self._popen.stdin.write("\n")
        self._popen.stdin.flush()
        return float(self._line())

    def clear_away(self) -> None:
        """End what is left of it."""
        if self.worker > 0:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.worker, signal.SIGKILL)
        self._popen.kill()
        self._popen.communicate()


WAYS: dict[str, tuple[str, Callable[[Process], float]]] = {
    "SIGKILL": ("alone", Process.kill),
    "exit": ("alone", Process.leave),
    "SIGKILL, and a worker holds the connection": ("worker", Process.kill),
}


@contextlib.contextmanager
def processes(path: Path, way: str, number: int) -> Iterator[list[Process]]:
    """Start runs; end what is left of them."""
    started: list[Process] = []
    try:
        started.extend(Process(path, way) for _ in range(number))
        yield started
    finally:
        for each in started:
            each.clear_away()


class Side:
    """The daemon's side."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "run.sock"
        self.registry = NotingRegistry()
        self.server = RunServer(self.registry)

    async def poll(self) -> None:
        """Do for runs what the daemon does in its polls, again and again."""
        while True:
            self.server.ask_again()
            self.server.forget_strangers()
            self.living()
            await asyncio.sleep(POLL_SECONDS)

    def living(self) -> int:
        """Return how many runs live."""
        return sum(run.up for run in self.registry.runs(Snapshot(time.time(), 0.0, None), time.monotonic()))


async def delays(folder: Path, way: str, end: Callable[[Process], float], number: int) -> list[float]:
    """Return how long the registry took to know of each end, in seconds."""
    side = Side(folder)
    side.server.start(side.path, 0o600)
    polls = asyncio.create_task(side.poll())
    found: list[float] = []
    try:
        while len(found) < number:
            with processes(side.path, way, min(AT_ONCE, number - len(found))) as runs:
                await side.registry.until(lambda runs=runs: side.living() == len(runs))  # type: ignore[misc]
                for run in runs:
                    before = await asyncio.to_thread(end, run)
                    await side.registry.until(lambda run=run: run.pid in side.registry.known)  # type: ignore[misc]
                    found.append(side.registry.known[run.pid] - before)
    finally:
        polls.cancel()
        side.server.stop()
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a smoke run: a few processes of each way")
    number = 3 if parser.parse_args().quick else 60
    print(
        f"| {number} runs that end by | p50, ms | longest, ms | at most, ms | met |\n| --- | ---: | ---: | ---: | --- |"
    )
    for name, (way, end) in WAYS.items():
        with tempfile.TemporaryDirectory() as folder:
            took = [1000 * each for each in asyncio.run(delays(Path(folder), way, end, number))]
        met = "yes" if max(took) <= BAR_MS else "**no**"
        print(f"| {name} | {median(took):.2f} | {max(took):.2f} | {BAR_MS:g} | {met} |", flush=True)


if __name__ == "__main__":
    main()
