"""`gpuwarden runs` as users see it: in a terminal of 80 columns, with untrusted names."""

from __future__ import annotations

import json
import os
import re
import sqlite3
import subprocess
import sys
import unicodedata
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from commands import run_command
from pseudo_terminal import terminal
from run_record_cases import BEGAN, example_record
from services import Daemon, end_processes, free_port
from stand_in_server import serve_answers

from gpuwarden.cli.runs import runs_command
from gpuwarden.cli.runs.run_list import render_table
from gpuwarden.config.loader import load
from gpuwarden.config.schema import Config
from gpuwarden.records.record import RunRecord
from gpuwarden.records.record_json import json_from_record
from gpuwarden.records.store import RecordStore, row_from_record
from mock_nvml import MockNvml

EVIL = "\x1b]0;owned\x07\x1b[2J\x1b[31mred\r\n\u202egpj.exe\x9b31m"
WIDE = "模型" * 20
COLUMNS = 80


def kept() -> Iterator[RunRecord]:
    """Yield the records of finished runs."""
    for number, name in enumerate(("resnet", EVIL, WIDE, "a" * 119)):
        made = example_record(pid=4000 + number, name=name)
        yield replace(
            made, began_timestamp_seconds=BEGAN + number, evidence=EVIL if name == EVIL else "last message: exit"
        )
    evil = example_record(pid=5000)
    error = replace(evil.reported_errors[0], text=EVIL, exception=EVIL)
    yield replace(evil, framework=EVIL, user=EVIL, reported_errors=(error,), errors={EVIL: 1})
    yield replace(example_record(pid=5000), boot_id="b1", began_timestamp_seconds=BEGAN - 9, name="of an earlier boot")
    longest = replace(
        example_record(pid=4194303), run_id="4194303-1234567890", outcome="out_of_memory", name="resnet50-imagenet"
    )
    stack = " ".join(f"frame {number} in train_step" for number in range(60))
    error = replace(longest.reported_errors[0], text=f"{stack} out of it all")
    yield replace(longest, began_timestamp_seconds=BEGAN - 20, reported_errors=(error,))


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory, mock_nvml_library: Path) -> Iterator[Daemon]:
    """Yield a daemon with the records of finished runs."""
    folder = tmp_path_factory.mktemp("runs")
    store = RecordStore(folder / "state/records", 1000)
    store.write(map(row_from_record, kept()))
    store.close()
    daemon = Daemon(folder, env=MockNvml(mock_nvml_library, folder).env(gpus=1))
    with end_processes(daemon):
        yield daemon


def run(*arguments: str, port: int, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run `gpuwarden runs` and return its output."""
    return run_command("runs", *arguments, "--listen", f"127.0.0.1:{port}", env={"TZ": "UTC", **(env or {})})


def in_terminal(*arguments: str, port: int) -> str:
    """Run it in a terminal of 80 columns, and return what it writes there."""
    with terminal("runs", *arguments, "--listen", f"127.0.0.1:{port}", columns=COLUMNS) as shown:
        assert shown.wait() == 0, shown.written
        return shown.written.decode().replace("\r\n", "\n")


def cells(line: str) -> int:
    """Return the columns that a line takes."""
    return sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in line)


def test_list_fits_a_terminal(daemon: Daemon) -> None:
    """Each run takes one line, however long its name, and IDs are not cut."""
    lines = in_terminal(port=daemon.port).splitlines()
    assert lines[0].split() == ["RUN", "NAME", "STATE", "START", "TIME", "STEPS", "PEAK"]
    assert lines.pop() == f"page of a run: http://127.0.0.1:{daemon.port}/run/RUN"
    assert len(lines) == 8
    assert [line for line in lines if cells(line) > COLUMNS] == []
    ids = ["4003-99", "4002-99", "4001-99", "5000-99", "4000-99", "5000-99", "4194303-1234567890"]
    assert [line.split()[0] for line in lines[1:]] == ids
    assert "  failed  " in lines[5]
    assert "  10.1 GiB" in lines[5]


def test_state_is_marked_where_it_hides_a_fault() -> None:
    """A run that looks fine has a mark for a loss of NaN, or else for training without a GPU."""
    both = replace(example_record(), state="finished", outcome="finished")
    cpu, fine = replace(both, nonfinite_loss=None), replace(both, nonfinite_loss=None, no_gpu=None)
    rows = list(render_table([both, cpu, fine, replace(both, state="failed", outcome="failed")], {}, COLUMNS))
    start = rows[0].index("STATE")
    assert [row[start : rows[0].index("START")].strip() for row in rows[1:]] == [
        "finished, NaN",
        "finished, CPU",
        "finished",
        "failed",
    ]


@pytest.mark.parametrize("arguments", [[], ["show", "4001"], ["show", "4002"], ["show", "5000-99"], ["list", "--past"]])
def test_terminal_gets_no_control_characters(daemon: Daemon, arguments: list[str]) -> None:
    """Names and error messages are printed without control characters, and within the terminal's width."""
    text = in_terminal(*arguments, port=daemon.port)
    assert {character for character in text if not character.isprintable()} == {"\n"}
    assert max(map(cells, text.splitlines())) <= COLUMNS
    assert "\N{REPLACEMENT CHARACTER}" in text or arguments == ["show", "4002"]


def test_show_has_front_and_end_of_a_long_message(daemon: Daemon) -> None:
    """A framework's stack stands before the error, a layer's arguments after it: the JSON has all of it."""
    shown = run("show", "4194303", port=daemon.port).stdout
    assert "frame 0 " in shown
    assert "out of it all" in shown
    assert "frame 30 " not in shown
    assert "frame 30 " in run("show", "4194303", "--json", port=daemon.port).stdout


def test_pages_are_where_the_daemon_says(tmp_path: Path, mock_nvml: MockNvml) -> None:
    """Links to pages begin with the daemon's `web.external_url`, which the command does not know."""
    config = tmp_path / "config.yaml"
    config.write_text("web: {external_url: 'https://gpus.example.org/box'}\n")
    store = RecordStore(tmp_path / "box/state/records", 1000)
    store.write([row_from_record(example_record(pid=4711))])
    store.close()
    box = Daemon(tmp_path / "box", "--config", str(config), env=mock_nvml.env(gpus=1))
    with end_processes(box):
        listed, shown = run(port=box.port), run("show", "4711-99", port=box.port)
    assert listed.stdout.splitlines()[-1] == "page of a run: https://gpus.example.org/box/run/RUN"
    assert re.search(r"^page +https://gpus\.example\.org/box/run/4711-99$", shown.stdout, re.MULTILINE)


def test_show_has_everything(daemon: Daemon) -> None:
    """The report has the run, its usage, its devices, and its errors with their evidence."""
    done = run("show", "4000", port=daemon.port)
    assert (done.returncode, done.stderr) == (0, "")
    said = dict(line.split(None, 1) for line in done.stdout.splitlines() if line and not line.startswith(" "))
    assert said["state"] == "failed (last message: exit)"
    assert said["page"] == f"http://127.0.0.1:{daemon.port}/run/4000-99"
    assert said["duration"] == "2h13m"
    assert said["job"] == "slurm-17 rank 1 of 4"
    assert said["user"] == "alice (uid 1000)"
    assert said["pid"] == "4000"
    assert said["steps"] == "1,000"
    assert said["input"] == "wait    10 % of step time"
    assert said["throttled"] == "2m00s by power limit"
    for words in (
        "requested   4.00 GiB for [20000,4000] float by MatMul on GPU:0 from GPU_0_bfc",
        "headroom    2.50 GiB on GPU-0, 1.50 GiB at the peak",
        "in use      9.00 GiB of 11.0 GiB on GPU:0",
        "message     OOM when allocating tensor with shape[20000,4000]",
        "headroom    512 MiB minimum under its cgroup's limit of 24.0 GiB",
    ):
        assert f"\n  {words}\n" in done.stdout, words
    assert "\n\nNVIDIA H100 80GB HBM3 GPU-0\n  allocated " in done.stdout
    assert (
        "\ncause         Out of GPU memory: the model does not fit\nevidence      4.00 GiB did not fit " in done.stdout
    )
    assert "\nnext step     Use a smaller model.\n" in done.stdout
    assert "\nheadroom      unknown on MIG-1-2: process unlisted\n" in done.stdout


def test_show_of_several_boots_is_the_newest(daemon: Daemon) -> None:
    """IDs are unique until the next boot; of two runs with the same ID the newest is shown."""
    assert "name          resnet" in run("show", "5000-99", port=daemon.port).stdout


def test_show_by_name_is_the_newest(daemon: Daemon) -> None:
    """A name, or its begin, that is no prefix of an ID shows the newest run of that name, and says so."""
    newest = next(
        each for each in json.loads(run("--json", port=daemon.port).stdout)["past"] if each["name"] == "resnet"
    )
    shown = json.loads(run("show", "resnet", "--json", port=daemon.port).stdout)
    assert shown["run_id"] == newest["run_id"]
    begun = run("show", "resne", "--json", port=daemon.port)
    assert json.loads(begun.stdout)["name"].startswith("resne")
    assert "the newest of " in begun.stderr


def test_last_is_the_newest_run(daemon: Daemon) -> None:
    """`last` is the run that began last, in `runs show`, `explain` and as a command of its own."""
    listed = json.loads(run("--json", port=daemon.port).stdout)
    newest = max(each["began_timestamp_seconds"] for each in (*listed["live"], *listed["past"]))
    shown = json.loads(run("show", "last", "--json", port=daemon.port).stdout)
    assert shown["began_timestamp_seconds"] == newest
    assert json.loads(run_command("last", "--json", "--listen", f"127.0.0.1:{daemon.port}").stdout) == shown


def test_records_without_a_daemon(tmp_path: Path) -> None:
    """Without a daemon, the runs are read from its database, which stays as it is."""
    store = RecordStore(tmp_path / "records", 10)
    goes_on = replace(example_record(ended=False), run_id="7-7", name="unet", began_timestamp_seconds=BEGAN + 5)
    store.write([row_from_record(example_record()), row_from_record(goes_on)])
    store.close()
    before = {each.name: each.read_bytes() for each in store.path.parent.iterdir()}
    port, env = free_port(), {"STATE_DIRECTORY": str(tmp_path), "HOME": str(tmp_path)}
    listed = run(port=port, env=env)
    assert (listed.returncode, [line.split()[0] for line in listed.stdout.splitlines()]) == (
        0,
        ["RUN", "7-7", "4711-99"],
    )
    assert f"These are the records in {tmp_path}/records" in listed.stderr
    shown = run("show", "resnet", port=port, env=env).stdout
    assert "\ncause         Out of GPU memory: the model does not fit\n" in shown
    assert "\nmemory on " in shown  # of the whole record
    assert json.loads(run("show", "last", "--json", port=port, env=env).stdout)["run_id"] == "7-7"
    assert {each.name: each.read_bytes() for each in store.path.parent.iterdir()} == before
    with sqlite3.connect(store.path) as connection:
        connection.execute("PRAGMA user_version = 99")
    with pytest.raises(OSError, match="of another version"):
        RecordStore.open_read_only(store.path.parent)


def test_prefix_has_to_be_unique(daemon: Daemon) -> None:
    """A prefix of several runs or of none is an error that lists them, or says where records are."""
    done = run("show", "400", port=daemon.port)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "gpuwarden: 400 matches 4 runs: 4003-99, 4002-99, 4001-99, 4000-99\n"
    done = run("show", "7\x1b[2J", port=daemon.port)
    assert done.returncode == 1
    assert "no run 7\N{REPLACEMENT CHARACTER}[2J; list the runs with: gpuwarden runs" in done.stderr
    assert "Run records are in /" in done.stderr
    done = run("show", "\udcff", port=daemon.port)  # a byte that is no UTF-8
    assert (done.returncode, "Traceback" in done.stderr) == (1, False)
    assert "no run \N{REPLACEMENT CHARACTER};" in done.stderr


def test_closed_pipe(daemon: Daemon) -> None:
    """A pipe that head has closed is not an error."""
    ours, theirs = os.pipe()
    os.close(ours)
    command = [sys.executable, "-m", "gpuwarden", "runs", "--listen", f"127.0.0.1:{daemon.port}"]
    done = subprocess.run(command, stdout=theirs, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    os.close(theirs)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("nothing", ["", " "])
def test_empty_id(daemon: Daemon, nothing: str) -> None:
    """An empty prefix matches every run; it is most likely an unset variable, so it is an error."""
    done = run("show", nothing, port=daemon.port)
    assert (done.returncode, done.stdout) == (2, "")
    assert "argument ID: run ID is empty; list the IDs with: gpuwarden runs\n" in done.stderr


def test_json(daemon: Daemon) -> None:
    """--json prints the whole answer of the API."""
    listed = json.loads(run("--json", port=daemon.port).stdout)
    assert [each["name"] for each in listed["past"]][2:4] == [EVIL, "resnet"]
    assert listed["live"] == []
    newest = json.loads(run("list", "--json", "--limit", "2", port=daemon.port).stdout)
    assert newest == {**listed, "past": listed["past"][:2]}
    shown = json.loads(run("--json", "show", "4001", port=daemon.port).stdout)
    assert shown.pop("events")
    assert shown["devices"][0].pop("timeline")
    assert shown == listed["past"][2]


@pytest.mark.parametrize(
    ("env", "bar"),
    [({"LC_ALL": "C"}, "#"), ({"PYTHONIOENCODING": "ascii"}, "#"), ({"LC_ALL": "C.UTF-8"}, "\N{FULL BLOCK}")],
)
def test_memory_chart_in_a_pipe(daemon: Daemon, env: dict[str, str], bar: str) -> None:
    """The chart takes 80 columns, in letters of the locale and without escape codes; events and diagnosis follow."""
    shown = run("show", "4000", port=daemon.port, env={**env, "COLUMNS": "80"}).stdout
    lines = shown[shown.index("memory on") :].splitlines()
    assert lines[0].split() == ["memory", "on", "GPU-0"]
    assert sum(bar * 5 in line for line in lines) >= 4
    assert not [character for character in shown if not character.isprintable() and character != "\n"]
    assert max(map(cells, lines)) <= COLUMNS
    assert "out of device memory: 4.00 GiB requested" in shown
    assert shown.isascii() or bar != "#"


def test_choices(daemon: Daemon) -> None:
    """--live and --past select, --limit takes the newest."""
    assert run("list", "--live", port=daemon.port).stdout.startswith("no running training run ")
    assert len(run("--past", "--limit", "1", port=daemon.port).stdout.splitlines()) == 3
    wrong = run("--limit", "0", port=daemon.port)
    assert (wrong.returncode, "0' is not a number of 1 or more" in wrong.stderr) == (2, True)


def test_ascii_terminal_gets_question_marks(daemon: Daemon) -> None:
    """Characters that an ASCII terminal cannot show are question marks."""
    done = run(port=daemon.port, env={"PYTHONIOENCODING": "ascii", "COLUMNS": "80"})
    assert (done.returncode, done.stderr) == (0, "")
    assert "??" in done.stdout


def test_without_a_daemon(tmp_path: Path) -> None:
    """The error says what to do, and where the records of finished runs are."""
    config = tmp_path / "config.yaml"
    config.write_text(f"records: {{path: {tmp_path}/records}}\n")
    done = run("--config", str(config), port=free_port(), env={"HOME": str(tmp_path)})
    assert (done.returncode, done.stdout) == (1, "")
    assert "no daemon answers at http://127.0.0.1:" in done.stderr
    assert "--listen, --config or GPUWARDEN_LISTEN" in done.stderr
    assert f"{tmp_path}/records" in done.stderr
    assert "Traceback" not in done.stderr


def test_daemon_without_a_folder(tmp_path: Path) -> None:
    """A daemon with simulated GPUs stores no records, and the error names no folder."""
    simulated = Daemon(tmp_path, "--source", "simulated")
    with end_processes(simulated):
        done = run("show", "none", port=simulated.port)
    assert done.returncode == 1
    assert "does not store finished runs" in done.stderr
    assert "/records" not in done.stderr


def test_configuration_names_the_daemon(daemon: Daemon, tmp_path: Path) -> None:
    """The address comes from the daemon's configuration; a wildcard address works."""
    config = tmp_path / "config.yaml"
    config.write_text(f"web: {{listen: '0.0.0.0:{daemon.port}'}}\n")
    proxied = {"http_proxy": "http://127.0.0.1:9"}
    done = run_command("runs", "show", "4000", "--config", str(config), env=proxied)
    assert (done.returncode, done.stderr) == (0, "")


def test_another_program_on_the_port() -> None:
    """The answer of another program is an error."""
    with serve_answers(lambda _path: (404, "text/html", b"")) as port:
        done = run(port=port)
    assert done.returncode == 1
    assert "has no /api/v1/runs: no gpuwarden daemon, or an older one" in done.stderr


def test_record_of_another_version() -> None:
    """A record that cannot be read leaves the lines of other runs in place."""
    good, odd = (
        json_from_record(example_record(pid=4000, name="resnet")),
        {**json_from_record(example_record(pid=4001)), "steps": "many"},
    )
    listing = {"version": 1, "live": [], "past": [odd, good]}
    with serve_answers(lambda _path: (200, "application/json", json.dumps(listing).encode())) as port:
        some = run(port=port)
        listing["past"] = [odd]
        none = run(port=port)
    assert (some.returncode, some.stderr) == (0, "")
    assert "resnet" in some.stdout
    assert some.stdout.splitlines()[-2].startswith(f"run {odd['run_id']} cannot be read: steps")
    assert none.returncode == 1
    assert f"this version cannot read any of the 1 runs; run {odd['run_id']}" in none.stderr


def test_whole_id_of_a_run_too_old_for_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole ID is requested from the daemon; a prefix only matches the list."""
    known = {"": {"live": [], "past": []}, "/4711-99": json_from_record(example_record())}
    monkeypatch.setattr(runs_command, "_fetch", lambda _config, path, _socket=None: known.get(path))
    assert json.loads(runs_command.render_run(Config(), "4711-99", as_json=True)) == json_from_record(example_record())
    with pytest.raises(OSError, match="no run 4711;"):
        runs_command.render_run(Config(), "4711", as_json=True)


def test_any_free_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon with port 0 is reached by its Unix socket, and the page of a run has no address."""
    asked = []

    def answered(api: object, path: str) -> object:
        asked.append(api)
        whole = json_from_record(example_record())
        return whole if path.endswith("/4711-99") else {"live": [whole], "past": []}

    monkeypatch.setattr(runs_command, "fetch_json", answered)
    config = load(None, {"web.listen": "127.0.0.1:0", "runs.socket": "/srv/run.sock"})
    text = runs_command.render_run(config, "4711-99", as_json=False)
    assert set(asked) == {Path("/srv/api.sock")}
    assert " /run/4711-99" in text


def explain(*arguments: str, port: int) -> subprocess.CompletedProcess[str]:
    """Run `gpuwarden explain` on a run."""
    return run_command("explain", *arguments, "--listen", f"127.0.0.1:{port}")


def test_explain_has_the_diagnosis_of_a_run(daemon: Daemon) -> None:
    """A run is explained by its errors' texts; the cause and the step are those of the daemon's diagnosis."""
    done = explain("4000-99", "--no-checks", port=daemon.port)
    assert (done.returncode, done.stderr) == (0, "")
    assert "(device_out_of_memory)" in done.stdout
    assert "1. 4.00 GiB did not fit next to 9.00 GiB of 11.0 GiB." in done.stdout
    assert "at /home/alice/train.py:12 in main" in done.stdout
    assert "Do first\n  Use a smaller model." in done.stdout
    document = json.loads(explain("4000-99", "--no-checks", "--json", port=daemon.port).stdout)
    assert document["problem"] == "device_out_of_memory"


def test_explain_cleans_a_runs_texts(daemon: Daemon) -> None:
    """Texts of a training process reach the terminal without control characters."""
    shown = explain("5000-99", "--no-checks", port=daemon.port).stdout
    assert {character for character in shown if not character.isprintable()} == {"\n"}


def test_explain_of_an_unknown_run(daemon: Daemon) -> None:
    """The error is that of `runs show`."""
    done = explain("nosuch", port=daemon.port)
    assert (done.returncode, done.stdout) == (1, "")
    assert "no run nosuch" in done.stderr
