"""Stage of the robustness benchmarks: a daemon on the mock driver, a run, a scraper, and figures with expectations."""

from __future__ import annotations

import http.client
import json
import os
import ssl
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from services import Daemon, Process, Samples, ending, until

from mocked import ROOT, environment
from programs import memory
from scraping import HOST, fetch, percentiles

if TYPE_CHECKING:
    from typing_extensions import Self

MAX_GROWTH_MIB = 8.0  # garbage of Python between two full collections; a leak of 10 bytes a message is 10 MiB
SCRAPE_SECONDS = 0.2
FAULTS = ("Traceback", "internal error")  # in the daemon's log


@dataclass(frozen=True, slots=True)
class Figure:
    """Row of the table; without `expected` it is for information, with `met` None a timing that fails nothing."""

    what: str
    measured: str
    expected: str = ""
    met: bool | None = None


def equal(what: str, measured: object, expected: object) -> Figure:
    """Return the figure of a value that must be exact."""
    return Figure(what, str(measured), str(expected), measured == expected)


def none_of(what: str, found: Sequence[object]) -> Figure:
    """Return the figure of what must not be, with two examples."""
    return Figure(what, f"{len(found)} {found[:2] or ''}".strip(), "0", not found)


def prefix(name: str, figures: Iterable[Figure]) -> Iterator[Figure]:
    """Put a name in front of what the figures are."""
    return (replace(each, what=f"{name}: {each.what}") for each in figures)


def count_by_reason(page: Samples, counter: str) -> dict[str, float]:
    """Return a counter's values other than 0 by their label `reason`."""
    return {dict(labels)["reason"]: count for labels, count in page.all(counter).items() if count}


def timing(what: str, measured: float, at_most: float) -> Figure:
    """Return the figure of a duration in milliseconds, with the load that it depends on."""
    return Figure(what, f"{measured:.1f} ms at load {os.getloadavg()[0]:.0f}", f"{at_most:g} ms or less")


@contextmanager
def workplace() -> Iterator[Path]:
    """Make a folder for a daemon and the part's own files."""
    with tempfile.TemporaryDirectory(prefix="gpuwarden-robustness-") as name:
        folder = Path(name)
        folder.chmod(0o755)  # hostile_user.py enters it as another user
        yield folder


@contextmanager
def serving(
    folder: Path, config: str = "", *, program: Sequence[str] = ("-m", "gpuwarden"), **variables: str
) -> Iterator[Daemon]:
    """Run a daemon on two mock GPUs in the folder, from its first poll on.

    `config` is YAML, `program` what Python runs, `variables` are for the environment. Started again in the same folder,
    the daemon has its former state.
    """
    (folder / "config.yaml").write_text(config)
    env = {**environment(folder, gpus=2), "MALLOC_ARENA_MAX": "1", **variables}
    del env["STATE_DIRECTORY"]  # the daemon's own
    daemon = Daemon(folder / "daemon", "--config", str(folder / "config.yaml"), env=env, program=program)
    daemon.socket.parent.chmod(0o755)
    with ending(daemon):
        if daemon.url.startswith("http:"):
            until(lambda: daemon.samples().up() == [1, 1], "both GPUs are read")
        yield daemon


def resident(daemon: Daemon) -> float:
    """Return the daemon's resident memory in MiB."""
    return memory(daemon.pid)["Rss"] / 1024


def soundness(daemon: Daemon, held: Sequence[float] = (), most: float = MAX_GROWTH_MIB) -> Iterator[Figure]:
    """Return figures that each part has: alive, no fault in the log, flat memory after the first third of `held`."""
    yield equal("daemon", "ended" if daemon.popen.poll() is not None else "alive", "alive")
    yield equal("tracebacks and internal errors in its log", sum(map(daemon.output().count, FAULTS)), 0)
    if held:
        first = held[len(held) // 3]
        what = f"growth of resident memory, from {first:.1f} MiB"
        yield Figure(what, f"{held[-1] - first:+.1f} MiB", f"{most:g} MiB or less", held[-1] - first <= most)


class Scraper(threading.Thread):
    """Client that scrapes on new connections and keeps the times and failures, for use in a with statement."""

    def __init__(self, daemon: Daemon, context: ssl.SSLContext | None = None, pause: float = SCRAPE_SECONDS) -> None:
        super().__init__()
        self._port, self._context, self._pause = daemon.port, context, pause
        self._stopping = threading.Event()
        self.seconds: list[float] = []
        self.failures: list[str] = []

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self.join()

    def run(self) -> None:
        """Scrape until the end."""
        while not self._stopping.wait(self._pause):
            began = time.perf_counter()
            try:
                self._scrape()
                self.seconds.append(time.perf_counter() - began)
            except (OSError, http.client.HTTPException) as error:
                self.failures.append(f"{type(error).__name__}: {error}")

    def _scrape(self) -> None:
        if self._context:
            connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                HOST, self._port, timeout=30, context=self._context
            )
        else:
            connection = http.client.HTTPConnection(HOST, self._port, timeout=30)
        try:
            fetch(connection)
        finally:
            connection.close()

    def figures(self, at_most: float = 50) -> Iterator[Figure]:
        """Return its failures and times."""
        yield none_of(f"failed of {len(self.seconds) + len(self.failures)} scrapes", self.failures)
        if len(self.seconds) > 1:
            median, p99 = percentiles(self.seconds)
            yield Figure("scrape, median", f"{median:.1f} ms")
            yield timing("scrape, 99th percentile", p99, at_most)


class CountedRun(Process):
    """Run that reports through the client's own code and whose steps are known, for use in a with statement."""

    def __init__(self, daemon: Daemon, folder: Path, name: str) -> None:
        command = [sys.executable, str(ROOT / "tests/support/reporter.py"), str(daemon.socket), name, "{}"]
        super().__init__(command, folder / f"{name}.log", {"PYTHONPATH": str(ROOT / "src")})
        self.name = name
        self.steps = 0
        self._orders = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.wait()

    def make_steps(self, count: int) -> None:
        """Make steps and wait until they have been counted in the run; they arrive with some later report."""
        self._order({"steps": count, "phase": "train", "stepping": True})
        self.steps += count

    def end(self) -> None:
        """End as a program does that has finished."""
        self.say(json.dumps({"end": True}))
        self.popen.wait(60)

    def _order(self, fields: Mapping[str, object]) -> None:
        self.say(json.dumps(fields))
        self._orders += 1
        until(lambda: self.output().count("done") >= self._orders, f"{self.name} has reported")

    def shown(self, daemon: Daemon) -> float | None:
        """Return its steps on the metrics page."""
        page = daemon.samples()
        found = page.all("gpuwarden_run_info", run_name=self.name)
        ids = [dict(labels)["run_id"] for labels in found]
        return page.value("gpuwarden_run_steps_total", run_id=ids[0]) if ids else None

    def figure(self, daemon: Daemon) -> Figure:
        """Return its steps on the page, once they have had time to arrive."""
        end = time.monotonic() + 30
        while (shown := self.shown(daemon)) != self.steps and time.monotonic() < end:
            time.sleep(0.2)
        return equal("steps of the run on the page", shown, float(self.steps))
