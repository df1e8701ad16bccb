"""`gpuwarden incidents` as users see it: in 80 columns, from a daemon and from a file, with untrusted names."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import run_command
from services import Daemon, end_processes, fetch, wait_until
from staged_incidents import staged_incident, store_incidents

from gpuwarden.incidents.incident_store import WITHHELD_LINE
from gpuwarden.web.api.api_paths import INCIDENTS
from mock_nvml import MockNvml

EVIL = "\x1b]0;owned\x07\x1b[2J\r\n\u202egpj.exe"
COLUMNS = 80
KERNEL_LINE = "NVRM: Xid (PCI:0000:12:00): 79, GPU has fallen off the bus."


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory, mock_nvml_library: Path) -> Iterator[Daemon]:
    """Yield a daemon with incidents in its run database."""
    folder = tmp_path_factory.mktemp("incidents")
    evil = staged_incident("killed")
    evil["finding"]["text"] = evil["finding"]["root"]["text"] = evil["host"] = evil["runs"][0]["name"] = EVIL
    del evil["ended_timestamp_seconds"]  # the daemon was killed
    store_incidents(folder, [staged_incident("too_hot"), evil, staged_incident("co_tenant")])
    daemon = Daemon(folder, env=MockNvml(mock_nvml_library, folder).env(gpus=1))
    with end_processes(daemon):
        wait_until(daemon.samples, "a page")
        yield daemon


def run(*arguments: str, port: int = 1, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run `gpuwarden incidents`."""
    environment = {"TZ": "UTC", "COLUMNS": str(COLUMNS), **(env or {})}
    return run_command("incidents", *arguments, "--listen", f"127.0.0.1:{port}", env=environment)


def output(*arguments: str, port: int = 1) -> str:
    """Return what it prints; it succeeds."""
    done = run(*arguments, port=port)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def write_file(path: Path, incident: Any) -> str:
    """Write an incident as `show --json` does; return the name."""
    path.write_text(json.dumps(incident))
    return str(path)


def listed(daemon: Daemon) -> list[Any]:
    """Return the incidents of the API, the newest first."""
    return list(json.loads(fetch(f"{daemon.url}{INCIDENTS}"))["incidents"])


def test_list_is_newest_first_within_80_columns(daemon: Daemon) -> None:
    """Each incident has a line with its whole id and the start of its finding."""
    lines = output(port=daemon.port).splitlines()
    assert lines[0].split() == ["INCIDENT", "TIME", f"({time.strftime('%Z')})", "FINDING"]
    assert [line.split()[0] for line in lines[1:]] == [each["id"] for each in listed(daemon)]
    assert all(len(line) <= COLUMNS for line in lines)
    assert any("Run diffusion ran out of device memory" in line for line in lines)


def test_json_is_the_answer_of_the_api(daemon: Daemon) -> None:
    """Scripts get the list, or the whole incident."""
    assert json.loads(output("--json", port=daemon.port))["incidents"] == listed(daemon)
    assert len(json.loads(output("--limit", "1", "--json", port=daemon.port))["incidents"]) == 1
    newest = listed(daemon)[0]["id"]
    whole = json.loads(output("show", newest, "--json", port=daemon.port))
    assert whole["series"] == json.loads(fetch(f"{daemon.url}{INCIDENTS}/{newest}"))["series"]


def test_show_by_a_prefix(daemon: Daemon) -> None:
    """A prefix of one id suffices; that of several is refused with their names, an unknown one with the next step."""
    hot = staged_incident("too_hot")["id"]
    assert hot in output("show", hot[:-2], port=daemon.port)
    assert listed(daemon)[0]["id"] in output("show", "last", port=daemon.port)
    done = run("show", "2", port=daemon.port)
    assert done.returncode == 1
    assert "2 matches 3 incidents" in done.stderr
    done = run("show", "9", port=daemon.port)
    assert done.stderr == "gpuwarden: no incident 9; list the incidents with: gpuwarden incidents\n"


def test_private_texts_come_by_the_unix_socket(daemon: Daemon) -> None:
    """The daemon's user reads the lines of the kernel log; by HTTP they are withheld."""
    hot = staged_incident("too_hot")["id"]
    by_http = json.loads(fetch(f"{daemon.url}{INCIDENTS}/{hot}"))
    assert by_http["kernel_lines"][0]["text"] == WITHHELD_LINE
    assert KERNEL_LINE in " ".join(output("show", hot, port=daemon.port).split())


def test_daemon_serves_the_page(daemon: Daemon) -> None:
    """The page is one file for all incidents, which loads the incident from the API."""
    hot = staged_incident("too_hot")["id"]
    assert "incident_page.js" in fetch(f"{daemon.url}/incident/{hot}")


def test_incident_of_a_killed_daemon_is_cut_short(daemon: Daemon) -> None:
    """The list and the report say which incident was not recorded to its end."""
    killed = staged_incident("killed")["id"]
    words = "cut short, as the daemon was killed"
    assert [line.split()[0] for line in output(port=daemon.port).splitlines() if "(cut short" in line] == [killed]
    assert words in output("show", killed, port=daemon.port)
    assert words not in output("show", staged_incident("too_hot")["id"], port=daemon.port)


def test_texts_of_processes_cannot_write_to_the_terminal(daemon: Daemon) -> None:
    """Names with control characters are shown without them."""
    killed = staged_incident("killed")["id"]
    name = "\N{REPLACEMENT CHARACTER}]0;"  # and "owned", which the list has no room for
    for printed, text in ((output(port=daemon.port), name), (output("show", killed, port=daemon.port), f"{name}owned")):
        assert text in printed
        assert all(character.isprintable() or character == "\n" for character in printed)


def test_record_opens_an_incident(daemon: Daemon) -> None:
    """An administrator records the present state, with a note."""
    done = daemon.run_subcommand("incidents", "record", "step time\ndoubled")
    assert done.returncode == 0
    recorded = done.stdout.split()[2].rstrip(";")
    shown = wait_until(lambda: run("show", recorded, port=daemon.port).stdout, "the incident")
    assert "step time doubled" in shown
    assert "Recording requested" in shown


def test_report_has_each_part(tmp_path: Path) -> None:
    """The report of a file has the finding, the timeline, charts, processes, runs, XIDs and the kernel log."""
    shown = output("show", write_file(tmp_path / "hot.json", staged_incident("too_hot")))
    lines = shown.splitlines()
    assert all(len(line) <= COLUMNS for line in lines)
    assert "  08:01:00      0s  first cause: GPU 2 was throttled (hardware thermal" in lines
    assert "  08:01:25    +25s  then: GPU 2 fell off the bus (XID 79)." in lines
    assert any("  then: run vit crashed" in line for line in lines)
    for part in ("temperature: 62 °C to 92 °C", "power: 540 W", "memory used: 20.6 GiB", "^ first cause"):
        assert part in shown
    for part in ("GPU 2: python (pid 5000001) has 20.6 GiB; user ada, run", "vit: crashed", "XID 79 (critical)"):
        assert part in shown
    assert "08:01:25 NVRM: Xid" in shown


@pytest.mark.parametrize(
    "changes",
    [
        {"series": None},
        {"gpus": [], "processes": "x", "runs": [1], "events": {}, "finding": {}},
        {"began_timestamp_seconds": 1e300, "finding": {"text": 5, "root": {"timestamp_seconds": -1}}},
        {"series": {"timestamp_seconds": [1, None, "x"], "gpus": {"GPU-1": {"memory_used_bytes": [None]}}}},
    ],
)
def test_file_of_another_version_costs_only_what_cannot_be_read(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Keys that are missing or of another type are left out."""
    incident = staged_incident("too_hot", **changes)
    assert incident["id"] in output("show", write_file(tmp_path / "incident.json", incident))


@pytest.mark.parametrize("text", ["", "{}", "[]", "nonsense", '{"incidents": []}'])
def test_file_without_an_incident(tmp_path: Path, text: str) -> None:
    """The message names the file, and how to write one."""
    file = tmp_path / "wrong.json"
    file.write_text(text)
    done = run("show", str(file))
    assert done.returncode == 1
    assert str(file) in done.stderr
    assert "gpuwarden incidents show ID --json" in done.stderr


def test_without_a_daemon() -> None:
    """The message says how to set the daemon's address."""
    done = run()
    assert done.returncode == 1
    assert "no daemon answers at http://127.0.0.1:1" in done.stderr
