"""The real programs that end-to-end tests start: the daemon, Prometheus, Alertmanager. Each ends with its context."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from commands import ForkedProcess, fork_with_input, run_command
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from system_parts import needs

T = TypeVar("T")
ROOT = Path(__file__).parents[2]


def wait_until(condition: Callable[[], T | None], what: str, limit: float = 60.0) -> T:
    """Wait for a condition to give something true, and return it; fail after `limit` seconds.

    The longer it takes, the less often it is checked: a check may cost as much as what it waits for.
    """
    began = time.monotonic()
    while True:
        value = condition()
        if value:
            return value
        waited = time.monotonic() - began
        if waited > limit:
            raise AssertionError(f"not within {limit:g} s: {what}; last seen: {value!r}")
        time.sleep(min(max(0.05, waited / 20), 0.25))


def free_port() -> int:
    """Return a port of 127.0.0.1 that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def fetch(url: str) -> str:
    """Return the body of a page; empty if there is no answer."""
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            return str(answer.read().decode())
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return ""


class Process:
    """A program and its output, in a file that a failing test can show.

    `gpuwarden`, and a script of tests/support, are forked by the server of commands; another program has its own start.
    """

    popen: subprocess.Popen[bytes] | ForkedProcess

    def __init__(self, command: list[str], log: Path, env: Mapping[str, str] | None = None) -> None:
        self.log = log
        log.touch()
        self._began = log.stat().st_size  # a restarted program goes on in the same file
        environment = {**os.environ, **(env or {})}
        program, *arguments = command
        if program == "gpuwarden" or program.endswith(".py"):
            script = None if program == "gpuwarden" else program
            self.popen = fork_with_input(arguments, log, log, environment, script)
            return
        with log.open("ab") as output:
            self.popen = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=output, env=environment)

    @property
    def pid(self) -> int:
        """The process's pid."""
        return self.popen.pid

    def output(self) -> str:
        """Return the output up to now."""
        return self.log.read_bytes()[self._began :].decode(errors="replace")

    def send_line(self, word: str) -> None:
        """Write a line to its standard input."""
        assert self.popen.stdin is not None
        self.popen.stdin.write(word.encode() + b"\n")
        self.popen.stdin.flush()

    def kill(self, how: int = signal.SIGKILL) -> int:
        """End it by a signal and return its exit status."""
        if self.popen.stdin:
            self.popen.stdin.close()
        if self.popen.poll() is None:
            self.popen.send_signal(how)
        try:
            return self.popen.wait(60)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()
            raise


class Daemon(Process):
    """`gpuwarden serve`; `program` is what takes the arguments of `gpuwarden`."""

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        env: Mapping[str, str] | None = None,
        port: int = 0,
        program: Sequence[str] = ("gpuwarden",),
    ) -> None:
        listen = f"127.0.0.1:{port}"
        command = [*program, "serve", "--listen", listen, *arguments]
        folder.mkdir(exist_ok=True)
        self.socket = folder / "run.sock"
        # As systemd sets it: the records of one test's runs are none of another's past.
        state = {"STATE_DIRECTORY": str(folder / "state")}
        super().__init__([*command, "--socket", str(self.socket)], folder / "daemon.log", {**state, **(env or {})})
        self.url = wait_until(self._find_url, "the daemon says where it listens")
        self.port = int(self.url.rpartition(":")[2])

    def _find_url(self) -> str:
        if self.popen.poll() is not None:
            raise AssertionError(f"the daemon ended with {self.popen.returncode}:\n{self.output()}")
        found = re.findall(r"metrics (https?://\S+)/metrics", self.output())
        return found[-1] if found else ""

    def page(self) -> str:
        """Return the page in text format."""
        return fetch(f"{self.url}/metrics")

    def open_files(self, folder: Path) -> set[str]:
        """Return the names of the files in a folder that it has open."""
        found = set()
        for entry in Path(f"/proc/{self.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                found.add(entry.readlink())
        return {link.name for link in found if link.parent == folder}

    def samples(self) -> Samples:
        """Return the current metrics page."""
        return Samples(self.page())

    def run_subcommand(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run `gpuwarden pause` or `resume` against it."""
        return run_command(*arguments, "--control", str(self.socket.parent / "control.sock"))


def alter_constants(constants: Mapping[str, Any]) -> tuple[str, str]:
    """Return the program of a daemon with constants set to what a test needs, by MODULE:NAME."""
    return str(ROOT / "tests/support/altered_daemon.py"), json.dumps(constants)


class Samples:
    """One page as a Prometheus client would parse it, but only the samples that a test reads."""

    def __init__(self, page: str) -> None:
        self.text = page
        self._lines: dict[str, list[str]] = {}
        for line in page.splitlines():
            self._lines.setdefault(line.partition(" ")[0].partition("{")[0], []).append(line)
        self._parsed: dict[str, list[Sample]] = {}

    def __bool__(self) -> bool:
        """Return whether there was a page."""
        return bool(self.text)

    def value(self, name: str, **labels: str) -> float | None:
        """Return the one sample of that name with at least these labels; None if there is none."""
        values = list(self.all(name, **labels).values())
        assert len(values) < 2, (name, values)
        return values[0] if values else None

    def all(self, name: str, **labels: str) -> dict[tuple[tuple[str, str], ...], float]:
        """Return the samples of that name with these labels among others, by all of their labels."""
        wanted = labels.items()
        if name not in self._parsed:
            families = text_string_to_metric_families("\n".join([*self._lines.get(name, ()), ""]))
            self._parsed[name] = [sample for family in families for sample in family.samples]
        return {
            tuple(sorted(sample.labels.items())): sample.value
            for sample in self._parsed[name]
            if wanted <= sample.labels.items()
        }

    def up(self) -> list[float]:
        """Return `gpuwarden_gpu_up` of each GPU that has it, in the order of their UUIDs, which is the mock's."""
        return [value for _labels, value in sorted(self.all("gpuwarden_gpu_up").items())]


class Prometheus(Process):
    """A real Prometheus that scrapes targets every second and evaluates the project's rules, or other `rules`."""

    def __init__(
        self,
        folder: Path,
        target: str,
        alertmanager: str | None = None,
        rules: str = "",
        more: Sequence[str] = (),
        *,
        access: Mapping[str, Any] | None = None,
    ) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "rules.yml").write_text(rules or (ROOT / "deploy/prometheus/rules/gpuwarden.yml").read_text())
        port = free_port()
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": ["rules.yml"],
            "scrape_configs": [
                {"job_name": "gpuwarden", "static_configs": [{"targets": [target, *more]}], **(access or {})}
            ],
            "alerting": {"alertmanagers": [{"static_configs": [{"targets": [alertmanager]}]}] if alertmanager else []},
        }
        (folder / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
        command = [needs("prometheus", "prometheus"), f"--config.file={folder}/prometheus.yml"]
        command += [f"--storage.tsdb.path={folder}/data", f"--web.listen-address=127.0.0.1:{port}"]
        super().__init__(command, folder / "prometheus.log")
        self.url = f"http://127.0.0.1:{port}"
        wait_until(lambda: fetch(f"{self.url}/-/ready"), "Prometheus is ready")

    def _get(self, path: str, **parameters: str) -> Any:
        body = fetch(f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}")
        answer = json.loads(body)
        assert answer["status"] == "success", body
        return answer["data"]

    def query(self, expression: str) -> dict[tuple[tuple[str, str], ...], float]:
        """Return the value of each series, by its sorted labels."""
        found = self._get("query", query=expression)["result"]
        return {tuple(sorted(each["metric"].items())): float(each["value"][1]) for each in found}

    def value(self, expression: str) -> float | None:
        """Return the value of the one series that the expression returns; None for none."""
        values = list(self.query(expression).values())
        assert len(values) < 2, values
        return values[0] if values else None

    def firing(self) -> set[str]:
        """Return the names of the alerts that fire now."""
        return {a["labels"]["alertname"] for a in self._get("alerts")["alerts"] if a["state"] == "firing"}


class Alertmanager(Process):
    """A real Alertmanager; without a `configuration` it notifies no receiver."""

    def __init__(self, folder: Path, address: str | None = None, configuration: str = "") -> None:
        folder.mkdir(exist_ok=True)
        self.address = address or f"127.0.0.1:{free_port()}"
        silent = "route: {receiver: none}\nreceivers: [{name: none}]\n"
        (folder / "alertmanager.yml").write_text(configuration or silent)
        if configuration and not (folder / "templates").exists():  # one that is started again finds them
            (folder / "templates").symlink_to(ROOT / "deploy/alertmanager/templates")
        program = needs("prometheus-alertmanager", "prometheus-alertmanager")
        command = [program, f"--config.file={folder}/alertmanager.yml", f"--storage.path={folder}/data"]
        command += [f"--web.listen-address={self.address}", "--cluster.listen-address="]
        super().__init__(command, folder / "alertmanager.log")
        wait_until(self._is_ready, "Alertmanager is ready")

    def _is_ready(self) -> bool:
        assert self.popen.poll() is None, self.output()
        return bool(fetch(f"http://{self.address}/-/ready"))

    def alerts(self) -> list[dict[str, Any]]:
        """Return the alerts it holds."""
        found: list[dict[str, Any]] = json.loads(fetch(f"http://{self.address}/api/v2/alerts") or "[]")
        return found

    def post(self, *alerts: Mapping[str, Any]) -> None:
        """Post alerts to it, as Prometheus does."""
        body, kind = json.dumps(alerts).encode(), {"Content-Type": "application/json"}
        urllib.request.urlopen(
            urllib.request.Request(f"http://{self.address}/api/v2/alerts", body, kind), timeout=5
        ).close()


@contextlib.contextmanager
def sleeping_process() -> Iterator[subprocess.Popen[bytes]]:
    """Start a process that does nothing, and end it."""
    with subprocess.Popen(["sleep", "600"]) as process:
        try:
            yield process
        finally:
            process.kill()


@contextlib.contextmanager
def end_processes(*processes: Process) -> Iterator[None]:
    """End the processes in any case; show the output of each if the test fails."""
    try:
        yield
    except BaseException:
        for process in processes:
            print(f"--- {process.log}\n{process.output()[-4000:]}")  # noqa: T201 - pytest shows it with the failure
        raise
    finally:
        for process in processes:
            process.kill(signal.SIGKILL)
