"""Scrapes of an exporter that a benchmark has started."""

import http.client
import re
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import quantiles

HOST = "127.0.0.1"
TIMEOUT_SECONDS = 30.0
PAUSE_SECONDS = 0.01  # between scrapes, so that they do not all fall between the same two polls

# In the order that Prometheus prefers them: it takes OpenMetrics where it can, and gzip.
PROMETHEUS = {
    "Accept": "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.1",
    "Accept-Encoding": "gzip",
}
PLAIN = {"Accept-Encoding": "identity"}
Connection = http.client.HTTPConnection


def connect(port: int) -> Connection:
    """Return a connection that opens, and reopens, on use."""
    return Connection(HOST, port, timeout=TIMEOUT_SECONDS)


def fetch(connection: Connection, headers: Mapping[str, str] = PLAIN, path: str = "/metrics") -> bytes:
    """Scrape once and read the whole body; raises OSError."""
    connection.request("GET", path, headers=dict(headers))
    answer = connection.getresponse()
    body = answer.read()
    if answer.status != http.client.OK:
        raise ConnectionError(f"status {answer.status} instead of a page")
    return body


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def read_page(port: int) -> bytes:
    """Return the scrape; empty without an answer."""
    try:
        return fetch(connect(port))
    except (OSError, http.client.HTTPException):
        return b""


def wait_for(port: int, is_full: Callable[[bytes], bool], log: Path) -> None:
    """Wait until a scrape is as wanted."""
    end = time.monotonic() + TIMEOUT_SECONDS
    while not is_full(shown := read_page(port)):
        if time.monotonic() > end:
            raise TimeoutError(f"the page of {len(shown)} bytes does not become full:\n{log.read_text()[-2000:]}")
        time.sleep(0.005)


def parse_samples(text: bytes, name: str, label: str = "") -> list[float]:
    """Return the values of the samples of a family, of those with `label` (such as `type="compute"`) if it is given."""
    found = re.finditer(rf"^{name}(?:\{{(.*)\}})? (\S+)".encode(), text, re.MULTILINE)
    return [float(each[2]) for each in found if label.encode() in (each[1] or b"")]


def count_samples(text: bytes) -> int:
    """Return the number of samples in a scrape."""
    return sum(not line.startswith(b"#") for line in text.splitlines())


def compute_percentiles(seconds: Sequence[float]) -> tuple[float, float]:
    """Return p50 and p99, in milliseconds. Of few values p99 is close to the longest."""
    found = quantiles(seconds, n=100, method="inclusive")
    return found[49] * 1e3, found[98] * 1e3
