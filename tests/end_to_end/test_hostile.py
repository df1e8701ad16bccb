"""A hostile local user against the real daemon, while a good run reports and a scraper scrapes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import socket
import statistics
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hostile_user import UNPRIVILEGED_UID
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from services import ROOT, Daemon, Process, Samples, end_processes, fetch, wait_until

from gpuwarden.protocol.codec import encode
from gpuwarden.protocol.messages import STEP_BUCKETS, Hello, Report
from gpuwarden.runs.run_server import MAX_CONNECTIONS, MAX_CONNECTIONS_PER_PROCESS
from mock_nvml import MockNvml

pytestmark = pytest.mark.slow  # hundreds of processes

EXPIRY_SECONDS = 3
MAX_RUNS = 512
ILL_UID = UNPRIVILEGED_UID if os.geteuid() == 0 else os.getuid()
BUCKETS = [0] * (len(STEP_BUCKETS) + 1)
HELLO = {"v": 1, "type": "hello", "name": "n", "framework": "f", "devices": {}}
REPORT = {
    "v": 1,
    "type": "report",
    "phase": "train",
    "steps": 1,
    "step_seconds": 1.0,
    "step_buckets": BUCKETS,
    "memory": {},
}
ERROR = {"v": 1, "type": "error", "kind": "other", "exception": "E", "text": "t", "phase": "train", "steps": 1}
END = {"v": 1, "type": "end", "reason": "r"}
# What is printable is let in, and has to be escaped wherever it is shown.
PRINTABLE = 'a"} 1\\n</td><script>alert(1)</script>{b="\\'
UNPRINTABLE = (
    "line\nline",
    "gpuwarden_up 0\r\n",
    "\x1b[2J\x1b]0;title\x07",
    "zero\0byte",
    "\ud800",
    "\u202egnp",
    "\u2066x\u2069",
    "\x85",
    "\u2028",
    "\ufeff",
    "x" * 5000,
)


class Scraper(threading.Thread):
    """Scrapes five times a second; notes how old the good run's last report is then, and what was no page."""

    def __init__(self, daemon: Daemon, pid: int) -> None:
        super().__init__()
        self._daemon = daemon
        name = "gpuwarden_run_last_report_timestamp_seconds"
        self._line = re.compile(rf'^{name}\{{run_id="{pid}-\d+"\}} (\S+)', re.MULTILINE)
        self._ended = threading.Event()
        self.ages: list[float] = []
        self.failed = 0

    def run(self) -> None:
        """Scrape until the end."""
        while not self._ended.wait(0.2):
            page = self._daemon.page()
            found = self._line.search(page)
            self.failed += not page
            if found:
                self.ages.append(time.time() - float(found[1]))

    def end(self) -> None:
        """Stop the thread."""
        self._ended.set()
        self.join()


class Siege:
    """Daemon, good run, scraper and hostile processes."""

    def __init__(self, folder: Path, daemon: Daemon, good: Process) -> None:
        self._folder = folder
        self.daemon = daemon
        self.good = good

    @contextlib.contextmanager
    def beset(self, what: str, processes: int, each: int = 1) -> Iterator[Process]:
        """Run a function in processes of a hostile user."""
        command = [str(ROOT / "tests/support/hostile_user.py"), str(self.daemon.socket), what]
        user = Process([*command, str(processes), str(each)], self._folder / "ill.log")
        with end_processes(user):
            wait_until(lambda: "ready" in user.output(), "the hostile user is at it", 120)
            yield user
            assert user.popen.stdin is not None
            user.popen.stdin.close()
            user.popen.wait(60)

    def connect(self) -> socket.socket:
        """Connect as this process."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.connect(str(self.daemon.socket))
        return connection

    def samples(self) -> Samples:
        """Return what the page says of anything but the many runs' own readings: to parse all of them takes seconds."""
        lines = self.daemon.page().splitlines(keepends=True)
        kept = ("gpuwarden_run_info", "gpuwarden_run_up", "gpuwarden_run_steps_total")
        return Samples("".join(each for each in lines if each.startswith(kept) or "gpuwarden_run_" not in each))

    def rejected(self) -> Counter[str]:
        """Return how many messages were rejected, by reason."""
        found = self.samples().all("gpuwarden_reports_rejected_total")
        return Counter({dict(labels)["reason"]: int(value) for labels, value in found.items() if value})

    def refused(self) -> float:
        """Return how many connections were refused."""
        return self.samples().value("gpuwarden_connections_refused_total") or 0.0

    def descriptors(self) -> int:
        """Return the number of connections that the daemon holds."""
        return len(list(Path(f"/proc/{self.daemon.pid}/fd").iterdir()))

    def resident(self) -> float:
        """Return the daemon's resident memory in MiB."""
        fields = Path(f"/proc/{self.daemon.pid}/statm").read_text(encoding="ascii").split()
        return int(fields[1]) * resource.getpagesize() / 2**20

    def cpu(self) -> float:
        """Return the daemon's CPU time in seconds."""
        return time.clock_gettime((~self.daemon.pid << 3) | 2)

    def uids(self) -> Counter[str]:
        """Return how many runs each user has on the page."""
        return Counter(dict(labels)["uid"] for labels in self.samples().all("gpuwarden_run_info"))

    def good_goes_on(self) -> None:
        """Wait until the page has steps that the good run makes from now on."""
        made = int(self.good.output().split()[-1])

        def shown() -> float:
            run_id = next(
                dict(labels)["run_id"] for labels in self.samples().all("gpuwarden_run_info", pid=str(self.good.pid))
            )
            return self.samples().value("gpuwarden_run_steps_total", run_id=run_id) or 0

        wait_until(lambda: shown() > made, "the good run's next steps")


@pytest.fixture
def expiry() -> int:
    """Return the expiry of a silent run in seconds."""
    return EXPIRY_SECONDS


@pytest.fixture
def siege(tmp_path: Path, mock_nvml: MockNvml, expiry: int) -> Iterator[Siege]:
    """Run a daemon with a good run and a scraper, and check that neither was affected."""
    config = tmp_path / "config.yaml"
    limits = f"max: {MAX_RUNS}, max_per_user: {MAX_RUNS}, new_per_minute: 60000"
    config.write_text(f"runs: {{expiry: {expiry}s, {limits}}}\n")
    folder = tmp_path / "daemon"
    daemon = Daemon(folder, "--config", str(config), env=mock_nvml.env(gpus=2))
    folder.chmod(0o755)  # the hostile user enters it while still one who may
    with end_processes(daemon):
        command = [str(ROOT / "tests/support/good_run.py"), str(daemon.socket)]
        good = Process(command, tmp_path / "good.log")
        with end_processes(good):
            it = Siege(tmp_path, daemon, good)
            wait_until(lambda: it.samples().all("gpuwarden_run_info", pid=str(good.pid)), "the good run")
            scraper = Scraper(daemon, good.pid)
            scraper.start()
            try:
                yield it
                it.good_goes_on()
            finally:
                scraper.end()
            assert scraper.failed == 0
            assert statistics.median(scraper.ages) < 3  # a poll and a report, on a machine that may be busy


def test_text_stays_text(siege: Siege) -> None:
    """No text of a message forges a sample or a line of the log; the status page's tests have what it shows of them."""
    fields = [("name", HELLO), ("framework", HELLO), ("visible_devices", HELLO), ("device_order", HELLO)]
    fields += [("job", HELLO), ("exception", ERROR), ("text", ERROR), ("kind", ERROR), ("reason", END)]
    with siege.connect() as connection:
        evil = {**HELLO, "framework": PRINTABLE, "job": PRINTABLE, "devices": {PRINTABLE: PRINTABLE, "GPU:0": None}}
        connection.send(json.dumps({**evil, "name": PRINTABLE}).encode())
        connection.send(json.dumps({**REPORT, "memory": {PRINTABLE: {"current": 1, "peak": 1}}}).encode())
        connection.send(json.dumps({**ERROR, "exception": PRINTABLE, "text": PRINTABLE, "kind": PRINTABLE}).encode())
        sent = 0
        for text in UNPRINTABLE:
            for field, message in fields:
                connection.send(json.dumps({**message, field: text}).encode())
                sent += 1
            for message in (
                {**HELLO, "devices": {text: None}},
                {**HELLO, "devices": {"GPU:0": text}},
                {**REPORT, "memory": {text: {"current": 1, "peak": 1}}},
                {**REPORT, "errors": {text: 1}},
                {**ERROR, "allocations": [{"op": text}]},
                {**ERROR, "memory": {text: {"current": 1, "peak": 1}}},
            ):
                connection.send(json.dumps(message).encode())
                sent += 1
        wait_until(lambda: siege.rejected() == {"invalid": sent}, f"all {sent} rejected")
        (labels,) = wait_until(
            lambda: siege.samples().all("gpuwarden_run_info", pid=str(os.getpid())), "the run with its names"
        )
        assert dict(labels)["run_name"] == dict(labels)["framework"] == PRINTABLE
        (family,) = [each for each in openmetrics_families(_openmetrics(siege)) if each.name == "gpuwarden_run"]
        assert PRINTABLE in {sample.labels["run_name"] for sample in family.samples}
        assert PRINTABLE in {run["name"] for run in json.loads(fetch(f"{siege.daemon.url}/api/v1/runs"))["live"]}
    odd = {each for each in siege.daemon.output() if not each.isprintable()} - {"\n"}
    assert not odd


def _openmetrics(siege: Siege) -> str:
    """Fetch the page as OpenMetrics; the families about runs alone, as a whole page takes long to parse."""
    wanted = {"Accept": "application/openmetrics-text;version=1.0.0"}
    with urllib.request.urlopen(urllib.request.Request(f"{siege.daemon.url}/metrics", headers=wanted)) as answer:
        return str(answer.read().decode())


def test_changing_names_make_few_series(siege: Siege) -> None:
    """A run that says hello again and again with other names is shown once per expiry."""
    seen: set[str] = set()
    begin = time.monotonic()
    with siege.connect() as connection:
        for number in range(2000):
            connection.send(json.dumps({**HELLO, "name": f"name {number}", "job": f"job {number}"}).encode())
            if number % 100 == 0:
                shown = siege.samples().all("gpuwarden_run_info", pid=str(os.getpid()))
                assert len(shown) <= 1
                seen |= {dict(labels)["run_name"] for labels in shown}
        wait_until(lambda: (siege.samples().value("gpuwarden_reports_received_total") or 0) > 2000, "all were received")
    assert len(seen) <= 2 + (time.monotonic() - begin) / EXPIRY_SECONDS


def test_descriptors_sent_along_are_closed(siege: Siege) -> None:
    """Open files that come with messages do not stay open in the daemon."""
    with siege.connect() as connection:
        connection.send(json.dumps(HELLO).encode())
        wait_until(lambda: siege.samples().all("gpuwarden_run_info", pid=str(os.getpid())), "this process as a run")
        before = siege.descriptors()
        for number in range(1, 51):
            socket.send_fds(connection, [json.dumps({**REPORT, "steps": number}).encode()], [0] * 50)
        wait_until(lambda: 50 in siege.samples().all("gpuwarden_run_steps_total").values(), "all were received")
        assert siege.descriptors() <= before + 8  # scrapes


def test_empty_message_harms_nobody(siege: Siege) -> None:
    """An empty message looks like the end of the connection, and is treated as one."""
    with siege.connect() as connection:
        connection.send(b"")
        connection.settimeout(60)
        assert connection.recv(1) == b""


def test_two_thousand_connections_of_one_process(siege: Siege) -> None:
    """One process holds a few; the rest is closed and counted."""
    before = siege.descriptors()
    with siege.beset("hold", 1, 2000):
        wait_until(lambda: siege.refused() == 2000 - MAX_CONNECTIONS_PER_PROCESS, "the others refused")
        assert siege.descriptors() <= before + MAX_CONNECTIONS_PER_PROCESS + 1 + 8  # its pidfd, and scrapes
    wait_until(lambda: siege.descriptors() <= before + 8, "its descriptors are closed")


def test_two_thousand_connections_of_many_processes(siege: Siege) -> None:
    """Many processes hold as many as there may be, and a run that comes then finds room."""
    before = siege.descriptors()
    processes = MAX_CONNECTIONS // MAX_CONNECTIONS_PER_PROCESS + 20
    with siege.beset("hold", processes, MAX_CONNECTIONS_PER_PROCESS):
        wait_until(lambda: siege.refused() >= 20 * MAX_CONNECTIONS_PER_PROCESS, "some refused")
        assert siege.descriptors() <= before + 2 * MAX_CONNECTIONS
        see_a_newcomer(siege)
    wait_until(lambda: siege.descriptors() <= before + 8, "their descriptors are closed")


def see_a_newcomer(siege: Siege, limit: float = 60.0) -> None:
    """Start another good run, and check that it appears within `limit` seconds."""
    command = [str(ROOT / "tests/support/good_run.py"), str(siege.daemon.socket), "newcomer"]
    newcomer = Process(command, siege.daemon.log.parent / "newcomer.log")
    with end_processes(newcomer):
        wait_until(lambda: siege.samples().all("gpuwarden_run_info", run_name="newcomer"), "the newcomer", limit)


@pytest.mark.skipif(os.geteuid() != 0, reason="takes two users")
@pytest.mark.parametrize("expiry", [600])  # else the first make room for the last where these take long to come
def test_one_users_runs_leave_room_for_anothers(siege: Siege) -> None:
    """A user who fills `runs.max` loses the newest for another user's run, once; then all is still."""
    with siege.beset("report", MAX_RUNS + 40):
        wait_until(lambda: siege.uids().total() == MAX_RUNS, "the table is full", 120)
        wait_until(lambda: siege.rejected()["too_many_runs"] >= 41, "the others are rejected", 120)
        assert siege.uids()[str(ILL_UID)] == MAX_RUNS - 1
        see_a_newcomer(siege)
        assert siege.uids()[str(ILL_UID)] == MAX_RUNS - 2


def test_five_hundred_runs_come_and_go(siege: Siege) -> None:
    """They are all seen, they all end, they are all forgotten, and the next ones live in the memory that they had.

    Garbage of up to 500 runs, 14 MiB, may wait for Python's next full collection. A leak of 4 MiB each time, which is
    8 KiB a run, fails this.
    """
    before = siege.descriptors()
    held = []
    for _ in range(6):
        with siege.beset("report", 500):
            wait_until(lambda: siege.uids().total() == 501, "all runs are on the page", 120)
        wait_until(lambda: siege.uids().total() == 1, "they are forgotten", 120)
        held.append(siege.resident())
    wait_until(lambda: siege.descriptors() <= before + 8, "their descriptors are closed")
    ended = siege.samples().all("gpuwarden_runs_ended_total")
    assert sum(ended.values()) == 3000
    assert held[5] < held[1] + 16, held


@pytest.mark.parametrize("how", ["flood", "reconnect"])
def test_flood_is_bounded(siege: Siege, how: str) -> None:
    """A flood of messages or connections takes part of one core, and neither memory nor descriptors."""
    descriptors = siege.descriptors()
    with siege.beset(how, 8):
        time.sleep(2)  # what is allocated once is there
        resident, cpu, begin = siege.resident(), siege.cpu(), time.monotonic()
        time.sleep(8)
        share = (siege.cpu() - cpu) / (time.monotonic() - begin)
        assert share < 0.6, share
        assert siege.resident() < resident + 4
        assert siege.descriptors() < descriptors + 2 * 8 * MAX_CONNECTIONS_PER_PROCESS
        siege.good_goes_on()
        see_a_newcomer(siege, 300)  # where others connect without end that takes as much luck as tries
        if how == "flood":
            rejected = siege.rejected()
            assert rejected["not_json"] > 1000, rejected
    wait_until(lambda: siege.descriptors() <= descriptors + 8, "its descriptors are closed")


def test_messages_are_as_these_tests_write_them() -> None:
    """Unmodified, the messages of these tests are accepted; else the tests above would prove nothing."""
    assert json.loads(encode(Hello("n", "f", {}))) == HELLO
    assert json.loads(encode(Report("train", 1, 1.0, tuple(BUCKETS), {}))) == REPORT
