"""Soak test: days of a busy host at a hundred times the daemon's speed; `python bench/soak.py`.

It polls the mock driver every 10 ms through the real binding while jobs start and end, GPUs fail and scrapers of every
kind connect. Prints its memory and files, and exits with status 1 if they grow beyond the tolerances below, a scrape
fails or the daemon logs an exception. A quarter of an hour is a day, if the machine keeps up; its first quarter is
warm-up. Needs a C compiler.
"""

import argparse
import http.client
import subprocess  # noqa: TID251 - a benchmark starts the programs that it measures
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from churn import GPUS
from mocked import build_mock, make_environment
from programs import count_open_files, count_threads, describe_conditions, read_memory
from scraping import PLAIN, PROMETHEUS, Connection, connect, fetch, read_page

HERE = Path(__file__).parent
ROWS = 30
SCRAPE_SECONDS = 0.075  # two Prometheus servers, each every 15 s
REST_SECONDS = 3.0  # until what has ended is forgotten

ONCE_A_POLL = "nvmlDeviceGetCount_v2"
OPENMETRICS = {"Accept": PROMETHEUS["Accept"]}
GZIP = {"Accept-Encoding": "gzip"}
REQUESTS: Sequence[tuple[str, Mapping[str, str]]] = (
    ("/metrics", PLAIN),
    ("/metrics", GZIP),
    ("/metrics", OPENMETRICS),
    ("/metrics", PROMETHEUS),
    ("/", PLAIN),
    ("/-/healthy", PLAIN),
)


@dataclass(frozen=True, slots=True)
class Resources:
    """Resources of the daemon at one moment; memory in MiB."""

    resident: float
    anonymous: float
    files: float
    threads: float


KINDS = tuple(Resources.__dataclass_fields__)

# What the mean of the last third may be above that of the first third, both after the warm-up. A leak of 100 bytes a
# poll makes 6 MiB in ten minutes at this speed.
TOLERANCES = Resources(resident=1.0, anonymous=1.0, files=8, threads=3)
SMOKE_TOLERANCES = Resources(resident=20, anonymous=20, files=60, threads=20)  # some seconds are all warm-up
# What may be left at the end, when nothing happens, above what there was before anything had happened: a
# thread for each GPU that hung stays for the next time.
REST_TOLERANCES = Resources(resident=float("inf"), anonymous=float("inf"), files=2, threads=GPUS)


def read_resources(pid: int) -> Resources:
    """Read the daemon's resources."""
    sizes = read_memory(pid)
    return Resources(sizes["Rss"] / 1024, sizes["Anonymous"] / 1024, count_open_files(pid), count_threads(pid))


def compute_growth(samples: Sequence[Resources]) -> Resources:
    """Return by how much the mean of the last third of the samples exceeds that of the first."""
    third = max(1, len(samples) // 3)

    def middle(name: str, part: Sequence[Resources]) -> float:
        return mean(float(getattr(each, name)) for each in part)

    return Resources(*(middle(name, samples[-third:]) - middle(name, samples[:third]) for name in KINDS))


def find_growth(grown: Resources, tolerances: Resources, when: str) -> Iterator[str]:
    """Return what has grown by more than it may."""
    for name in KINDS:
        by, most = getattr(grown, name), getattr(tolerances, name)
        if by > most:
            yield f"{name} grew by {by:.2f} {when}; at most {most:g} is tolerated"


class Client:
    """Client that requests pages in turn, on persistent and on new connections, and counts errors."""

    def __init__(self, port: int) -> None:
        self.requests = 0
        self.failures: list[str] = []
        self._port = port
        self._kept = connect(port)

    def request(self) -> None:
        """Request one page."""
        path, headers = REQUESTS[self.requests % len(REQUESTS)]
        reopen = self.requests // len(REQUESTS) % 2
        self.requests += 1
        if reopen:
            fresh = connect(self._port)
            self._fetch(fresh, path, headers)
            fresh.close()
        else:
            self._fetch(self._kept, path, headers)

    def _fetch(self, connection: Connection, path: str, headers: Mapping[str, str]) -> None:
        try:
            if not fetch(connection, headers, path):
                self.failures.append(f"{path}: an empty page")
        except (OSError, http.client.HTTPException) as error:
            self.failures.append(f"{path}: {error!r}")
            connection.close()

    def close(self) -> None:
        """Close the connections."""
        self._kept.close()


@dataclass(frozen=True, slots=True)
class Daemon:
    """Daemon at a hundred times its speed."""

    pid: int
    port: int
    log: Path


@contextmanager
def run_daemon(folder: Path) -> Iterator[Daemon]:
    """Run the daemon, from its first scrape on."""
    log = folder / "log"
    control = {"MOCK_NVML_CONTROL": str(folder / "mock-nvml.control")}
    env = {**make_environment(folder, gpus=GPUS), **control, "MALLOC_ARENA_MAX": "1"}  # as the systemd unit has it
    command = [sys.executable, str(HERE / "fast_daemon.py"), str(folder)]
    with log.open("wb") as output, subprocess.Popen(command, env=env, stdout=-1, stderr=output, text=True) as started:
        assert started.stdout is not None
        try:
            line = started.stdout.readline()
            if not line:
                raise RuntimeError(f"the daemon did not start:\n{log.read_text()[-2000:]}")
            yield Daemon(started.pid, int(line), log)
        except OSError as error:  # the daemon has ended
            raise RuntimeError(f"the daemon ended:\n{log.read_text()[-2000:]}") from error
        finally:
            started.kill()


@contextmanager
def run_churn(folder: Path) -> Iterator[None]:
    """Run jobs and faults while the context lasts."""
    with subprocess.Popen([sys.executable, str(HERE / "churn.py"), str(folder)], stdin=-1) as started:
        yield
        assert started.stdin is not None
        started.stdin.close()
        if started.wait(30):
            raise RuntimeError(f"the churn ended with status {started.returncode}")


def print_row(minutes: float, hours: float, held: Resources) -> str:
    """Print one line of the table."""
    return (
        f"| {minutes:.1f} | {hours:.3f} | {held.resident:.2f} | {held.anonymous:.2f} | {held.files} | {held.threads} |"
    )


def soak(minutes: float, tolerances: Resources) -> list[str]:
    """Soak and print; return the problems."""
    with tempfile.TemporaryDirectory(prefix="gpuwarden-soak-") as name:
        folder = Path(name)
        counted = build_mock(folder)
        with run_daemon(folder) as daemon:
            time.sleep(REST_SECONDS)
            read_page(daemon.port)  # so that a page and its connection have been there before
            rest, client = read_resources(daemon.pid), Client(daemon.port)
            samples: list[Resources] = []
            began, step = time.monotonic(), minutes * 60 / ROWS
            before = counted.calls()[ONCE_A_POLL]
            with run_churn(folder):
                while len(samples) < ROWS:
                    while time.monotonic() < began + step * (len(samples) + 1):
                        time.sleep(SCRAPE_SECONDS)
                        client.request()
                    samples.append(read_resources(daemon.pid))
                    polls = counted.calls()[ONCE_A_POLL] - before
                    print(print_row((time.monotonic() - began) / 60, polls / 3600, samples[-1]), flush=True)
            client.close()
            time.sleep(REST_SECONDS)
            read_page(daemon.port)
            ended = read_resources(daemon.pid)
            logged = daemon.log.read_text(encoding="utf-8", errors="replace")
    left = Resources(*(getattr(ended, each) - getattr(rest, each) for each in KINDS))
    grown = compute_growth(samples[len(samples) // 4 :])
    print(f"\n{client.requests} pages, {len(client.failures)} failed.")
    for when, held in {"Last third less first": grown, "At rest, before": rest, "At rest, after": ended}.items():
        print(f"{when}: {', '.join(f'{name} {getattr(held, name):.2f}' for name in KINDS)}.")
    exceptions = logged.count("Traceback (most recent call last)")
    return [
        *find_growth(grown, tolerances, "while it was busy"),
        *find_growth(left, REST_TOLERANCES, "from rest to rest"),
        *client.failures[:10],
        *([f"{exceptions} exceptions are in the daemon's log:\n{logged[-3000:]}"] if exceptions else []),
    ]


def main() -> int:
    """Soak; return the exit status."""
    parser = argparse.ArgumentParser(description="Soak the daemon on the mock driver at a hundred times its speed.")
    parser.add_argument("--minutes", type=float, default=15, help="how long; 15 are a day of the daemon's")
    parser.add_argument("--quick", action="store_true", help="a smoke run of some seconds; it finds no leak")
    chosen = parser.parse_args()
    print(f"{GPUS} GPUs of the mock driver, a poll every 10 ms; {describe_conditions()}.\n")
    print("| minutes | hours by polls | resident MiB | anonymous MiB | open files | threads |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: |")
    wrong = soak(0.1, SMOKE_TOLERANCES) if chosen.quick else soak(chosen.minutes, TOLERANCES)
    print("\n".join(wrong) or "Nothing grew by more than is tolerated.")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
