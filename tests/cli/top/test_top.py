"""`gpuwarden top` in real terminals: restarts of the daemon, untrusted names, odd answers, all sizes."""

from __future__ import annotations

import copy
import io
import json
import re
import signal
import socket
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from commands import run_command
from pseudo_terminal import ALTERNATE_OFF, ALTERNATE_ON, CURSOR_ON, list_control_sequences, terminal
from rich.cells import cell_len
from rich.console import Console
from services import Daemon, end_processes, fetch, free_port, wait_until
from stand_in_server import serve_answers

from gpuwarden.cli.common.api_client import ApiError, fetch_json
from gpuwarden.cli.top.layout import render_box
from gpuwarden.cli.top.run_table import make_run_table
from gpuwarden.cli.top.state_reader import fetch_state
from gpuwarden.cli.top.top_command import Display
from gpuwarden.config.value_types import Address
from gpuwarden.protocol.codec import encode
from gpuwarden.protocol.messages import Hello
from gpuwarden.web.api.api_object import ApiObject
from gpuwarden.web.api.api_paths import RUNS
from mock_nvml import MockNvml

HOSTILE = "\x1b]0;owned\x07\x1b[2J[red]x[/red]\r\n\u202egpj \x9b31m"
WIDE = "模型" * 30
DRAWING = {b"h", b"l", b"m", b"H"}  # modes, colors, and where to write


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """Yield a daemon with eight simulated GPUs and their runs."""
    daemon = Daemon(tmp_path_factory.mktemp("top"), "--source", "simulated")
    with end_processes(daemon):
        yield daemon


def at(port: int) -> tuple[str, ...]:
    """Return the arguments that name a daemon."""
    return "top", "--listen", f"127.0.0.1:{port}"


def test_gpus_of_a_run() -> None:
    """A GPU that the driver cannot confirm has a question mark; one that the run does not use is left out."""
    devices = [
        {"uuid": "GPU-0"},
        {"uuid": "GPU-1", "unverified": True},
        {"uuid": "GPU-2", "unused": True},
    ]
    console = Console(width=120)
    with console.capture() as shown:
        console.print(
            make_run_table(
                [ApiObject({"name": "resnet", "up": True, "devices": devices})],
                {"GPU-0": "0", "GPU-1": "1", "GPU-2": "2"},
                120,
            )
        )
    assert re.search(r"resnet +0,1\? +running", shown.get())


def test_box_fits_the_terminal(box: Daemon) -> None:
    """All GPUs and runs are shown, problems first; q quits and restores the terminal."""
    for columns, lines in ((80, 24), (200, 50)):
        with terminal(*at(box.port), columns=columns, lines=lines) as seen:
            shown = seen.wait_until(lambda text: "bert-finetune" in text and "q quit" in text, "the box")
            assert "  8 " in shown[0]
            assert " GPUs: " in shown[0]
            assert "simulated GPUs" in shown[1]
            rows = {line.split()[0] for line in shown if "/79.6 GiB " in line}
            assert len(rows) == 8 or any("more GPU" in line for line in shown)
            assert sum(" running " in line for line in shown) >= 4
            assert ("█ in use ▒ reserved" in seen.text()) == (columns == 200)
            assert seen.text().count("H100") == (columns == 200)  # the model is named once, if it fits
            assert seen.read_modes() != seen.modes
            seen.press(b"q")
            assert seen.wait() == 0
            assert seen.read_modes() == seen.modes
            assert CURSOR_ON in seen.written
            assert ALTERNATE_OFF in seen.written


def test_owner_is_readable(box: Daemon) -> None:
    """User and run are whole at every width."""
    answer = json.loads(fetch(f"{box.url}/api/v1/state"))
    for width in (80, 99, 100, 139, 140, 200):
        assert any("hedy bert-finetune" in line for line in drawn(answer, width, None)), width


def test_cells_of_a_row_stay_together(box: Daemon) -> None:
    """On a wide terminal names have the room that they need, and no gap of half a line behind them."""
    answer = json.loads(fetch(f"{box.url}/api/v1/state"))
    for width in (120, 200, 300):
        (heading, *_) = [line for line in drawn(answer, width, None) if "STEPS/S" in line]
        assert re.search(r"(NAME|RUN) {2,25}GPU ", heading), heading
    answer["runs"][0]["name"] = "n" * 60
    lines = drawn(answer, 200, None)
    assert any("n" * 60 + " " in line for line in lines)
    answer["runs"][0]["name"] = "n" * 400
    assert max(map(len, drawn(answer, 200, None))) <= 200


def test_keys(box: Daemon) -> None:
    """`s` sorts, the arrows scroll over all rows and stop at the end, `?` explains, and the last line has the keys."""
    with terminal(*at(box.port), columns=80, lines=16) as seen:
        seen.wait_until(lambda text: "s sort: problem" in text and "bert-finetune" in text, "the box")
        seen.press(b"ss")
        shown = seen.wait_until(lambda text: "s sort: memory" in text, "the order")
        used = [float(line[len("  0    ") + 5 :].split("/")[0]) for line in shown if "/79.6 GiB" in line]
        assert used == sorted(used, reverse=True)
        seen.press(b"\x1b[B" * 3)
        seen.wait_until(lambda text: "GPUs: " not in text and "/79.6 GiB" in text, "the title is scrolled away")
        seen.press(b"\x1b[6~" * 30)
        seen.wait_until(lambda text: "run bert-finetune started" in text, "the end")
        seen.press(b"\x1b[5~" * 30)
        seen.wait_until(lambda text: " GPUs: " in text, "the start")
        seen.press(b"?")
        seen.wait_until(lambda text: "show or hide this help" in text and "/79.6 GiB" not in text, "the help")
        seen.press(b"?q")
        assert seen.wait() == 0


def test_display_follows_the_state_and_the_window(tmp_path: Path, mock_nvml: MockNvml) -> None:
    """A lost GPU comes first, in red; a larger window shows all GPUs."""
    daemon = Daemon(tmp_path, env=mock_nvml.env(gpus=8))
    with end_processes(daemon), terminal(*at(daemon.port), lines=9) as seen:
        seen.wait_until(lambda text: "more GPUs" in text, "as many GPUs as there is room for")
        mock_nvml.lose(6)
        lost = seen.wait_until(lambda text: "GPU 6: not responding" in text, "the lost GPU")
        assert "✖ GPU 6: not responding: GPU is lost" in lost[1]
        assert "red" in seen.colors()
        seen.resize(120, 40)
        seen.wait_until(lambda text: text.count("/700 W") == 7 and "No training run reports" in text, "all GPUs")


def test_only_changed_lines_are_written() -> None:
    """A line that is on the screen is not written again, unless the screen may have changed."""
    written = io.StringIO()
    display = Display(Console(file=written, width=80, height=24, force_terminal=True))
    display.state = {"version": 1, "gpus": [{"index": 0, "utilization_ratio": 0.25, "status": "up"}]}
    display.refresh(whole=True)
    first = written.getvalue()
    assert first.count("25 %") == first.count("No training run") == 1
    display.refresh()
    assert written.getvalue() == first
    display.state["gpus"][0]["utilization_ratio"] = 0.75
    display.refresh()
    changed = written.getvalue().removeprefix(first)
    assert "75 %" in changed
    assert "No training run" not in changed
    display.refresh(whole=True)
    assert written.getvalue().count("No training run") == 2


def test_signals_end_it(box: Daemon) -> None:
    """Ctrl-C, SIGTERM, SIGHUP and a closed terminal end it without an error."""
    for how in ("ctrl_c", signal.SIGTERM, signal.SIGHUP, "window"):
        with terminal(*at(box.port)) as seen:
            seen.wait_until(lambda text: "bert-finetune" in text, "the box")
            if how == "window":
                seen.close()
                assert seen.process.wait(60) == 0
                continue
            if isinstance(how, signal.Signals):
                seen.process.send_signal(how)
            else:
                seen.press(b"\x03")
            assert seen.wait() == 0, how
            assert b"Traceback" not in seen.written
            assert seen.read_modes() == seen.modes


def test_ctrl_z_restores_the_terminal(box: Daemon) -> None:
    """Ctrl-Z restores the terminal, and SIGCONT shows the state again."""
    with terminal(*at(box.port)) as seen:
        seen.wait_until(lambda text: "bert-finetune" in text, "the box")
        seen.press(b"\x1a")
        state = Path(f"/proc/{seen.process.pid}/stat")
        wait_until(lambda: state.read_text().rpartition(")")[2].split()[0] == "T", "it is stopped")
        assert seen.read_modes() == seen.modes
        seen.read_output()
        assert ALTERNATE_OFF in seen.written
        before = len(seen.written)
        seen.process.send_signal(signal.SIGCONT)
        seen.wait_until(
            lambda _: ALTERNATE_ON in seen.written[before:] and b"bert" in seen.written[before:], "the box again"
        )
        seen.press(b"q")
        assert seen.wait() == 0


def test_restart_of_the_daemon(tmp_path: Path, mock_nvml: MockNvml) -> None:
    """Without a daemon there is an error and a retry; the last state is shown with its age."""
    port = free_port()
    with terminal(*at(port)) as seen:
        seen.wait_until(
            lambda text: f"no daemon answers at http://127.0.0.1:{port}: Connection refused" in text, "its lack"
        )
        env = mock_nvml.env(gpus=2)
        first = Daemon(tmp_path, env=env, port=port)
        with end_processes(first):
            seen.wait_until(lambda text: "2 GPUs: 2 OK" in text and "no daemon" not in text, "the box")
        gone = seen.wait_until(lambda text: "no daemon answers" in text, "that the daemon is gone")
        assert gone[0].startswith("Retrying: no daemon answers")
        assert gone[1].startswith("State of ")
        assert "2 GPUs: 2 OK" in gone[2]
        second = Daemon(tmp_path, env=env, port=port)
        with end_processes(second):
            seen.wait_until(lambda text: "no daemon" not in text and "2 GPUs: 2 OK" in text, "the box again")
            seen.press(b"q")
            assert seen.wait() == 0


def server(status: int, body: bytes) -> AbstractContextManager[int]:
    """Serve one answer to all requests, like another program or version of the daemon; yield the port."""
    return serve_answers(lambda _path: (status, "application/json", body))


def test_other_daemons_are_named() -> None:
    """A daemon that is older, newer or without a poll, or another program, is an error; with --once the status is 1."""
    for status, body, expected in (
        (404, b"", "has no /api/v1/state: no gpuwarden daemon, or an older one"),
        (503, b"", "has no successful poll"),
        (500, b"", "is not a gpuwarden daemon: it responded with status 500"),
        (200, b"<html>", "is not a gpuwarden daemon: unexpected response from /api/v1/state"),
        (200, b"[1]", "is not a gpuwarden daemon: unexpected response from /api/v1/state"),
        (200, b'{"version": 2}', "has version 2 of /api/v1/state; this gpuwarden reads 1"),
    ):
        with server(status, body) as port, pytest.raises(OSError, match=re.escape(expected)):
            fetch_state(Address("127.0.0.1", port))
    with server(503, b"") as port:
        with pytest.raises(ApiError, match="cannot read its run database; see its log"):
            fetch_json(Address("127.0.0.1", port), f"{RUNS}?limit=1")
        done = run_command(*at(port), "--once")
        assert (done.returncode, done.stdout) == (1, "")
        assert "has no successful poll" in done.stderr


def test_once_without_a_terminal(box: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """--once prints 80 columns of plain text, all GPUs and no control characters."""
    for name in ("COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)
    done = run_command(*at(box.port), "--once")
    text = done.stdout
    assert (done.returncode, done.stderr) == (0, "")
    assert max(map(cell_len, text.splitlines())) <= 80
    assert sum("/79.6 GiB " in line for line in text.splitlines()) == 8
    assert {character for character in text if not character.isprintable()} == {"\n"}
    wider = run_command(*at(box.port), "--once", env={"COLUMNS": "160"}).stdout
    assert 140 < max(map(cell_len, wider.splitlines())) <= 160


def test_json_for_scripts(box: Daemon) -> None:
    """--json prints the API's answer and exits, with --once or without; a pipe needs one of the two."""
    wait_until(lambda: "energy" in json.loads(fetch(f"{box.url}/api/v1/state")), "energy, from its second reading on")
    for arguments in (["--once", "--json"], ["--json"]):
        done = run_command(*at(box.port), *arguments)
        assert json.loads(done.stdout).keys() == json.loads(fetch(f"{box.url}/api/v1/state")).keys()
    piped = run_command(*at(box.port))
    assert piped.returncode == 1
    assert "top needs a terminal; use --once" in piped.stderr


def test_no_color(box: Daemon) -> None:
    """NO_COLOR switches colors off."""
    with terminal(*at(box.port), env={"NO_COLOR": "1"}) as seen:
        seen.wait_until(lambda text: "bert-finetune" in text, "the box")
        assert seen.colors() == set()


def test_untrusted_names_are_harmless(tmp_path: Path, mock_nvml: MockNvml) -> None:
    """Markup and wide letters in a run's name are shown literally, within their column."""
    daemon = Daemon(tmp_path, env=mock_nvml.env(gpus=1))
    with end_processes(daemon), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as run:
        run.connect(str(daemon.socket))
        run.send(encode(Hello(f"[red]x[/red]:smile:{WIDE}", "none", {})))
        wait_until(lambda: "gpuwarden_run_info{" in daemon.page(), "the run")
        with terminal(*at(daemon.port)) as seen:
            lines = seen.wait_until(lambda text: "[red]x[/red]:sm" in text, "the name as it is")
            wide = next(line for line in lines if line.startswith("  [red]x"))
            assert cell_len(wide) <= 80
            seen.press(b"q")
            assert seen.wait() == 0
            assert list_control_sequences(seen.written) <= DRAWING


def test_untrusted_texts_send_no_escape_sequences(box: Daemon) -> None:
    """No text of an answer reaches the terminal as an escape sequence."""
    answer = json.loads(fetch(f"{box.url}/api/v1/state"))
    for of, key in list(_places(answer)):
        if isinstance(of[key], str):
            of[key] = HOSTILE
    with server(200, json.dumps(answer).encode()) as port, terminal(*at(port), columns=160) as seen:
        lines = seen.wait_until(lambda text: "[red]x[/red]" in text, "the texts as they are")
        assert any("\N{REPLACEMENT CHARACTER}]0;owned" in line for line in lines)
        seen.press(b"q")
        assert seen.wait() == 0
        assert list_control_sequences(seen.written) <= DRAWING
        for each in (b"\x1b[2J", b"\x07", "\u202e".encode(), "\x9b".encode()):
            assert each not in seen.written


def drawn(answer: Any, width: int, height: int | None) -> list[str]:
    """Return the lines of the display."""
    console = Console(width=width, height=height or 25, force_terminal=True, color_system=None, markup=False)
    with console.capture() as captured:
        console.print(render_box(answer, width, height, 1e9), crop=False)
    return captured.get().splitlines()


def _places(of: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each place in an answer, as the object and the key."""
    for key, value in list(of.items() if isinstance(of, dict) else enumerate(of)):
        yield of, key
        if isinstance(value, (dict, list)):
            yield from _places(value)


def test_odd_answers_are_drawn(box: Daemon) -> None:
    """A missing key, or a value of another type, costs its cell only, and the lines still fit."""
    answer = json.loads(fetch(f"{box.url}/api/v1/state"))
    answer["gpus"], answer["runs"], answer["events"] = answer["gpus"][:1], answer["runs"][:1], answer["events"][:1]
    answer["gpus"][0]["mig"] = [{"uuid": "MIG-1", "memory_size_bytes": 1, "gpu_instance": 1}]
    answer["gpus"][0]["troubles"] = [{"level": "critical", "text": "x"}]
    places = len(list(_places(answer)))
    assert places > 100
    for place in range(places):
        nonsense: tuple[Any, ...] = (None, True, -1, 1e308, "[b]" * 99, [], [[]], {}, "\x1b[2J")
        junk = nonsense[place % 9]
        broken = copy.deepcopy(answer)
        of, key = list(_places(broken))[place]
        of[key] = junk
        lines = drawn(broken, 80, None)
        assert max(map(cell_len, lines)) <= 80, (key, junk)
    assert drawn({"version": 1}, 80, 24)


def test_lost_gpu_keeps_its_run_and_user() -> None:
    """The row of a GPU that does not answer says so in words of its own, and who trains on it."""
    gpus = [
        {"index": 5, "uuid": "GPU-5", "status": "fault", "fault": "gpu_is_lost", "condition": "critical"},
        {"index": 6, "uuid": "GPU-6", "status": "asleep"},
    ]
    run = {"run_id": "4-2", "name": "tabular-embedding", "user": "grace", "up": True, "devices": [{"uuid": "GPU-5"}]}
    run |= {"steps_per_second": 3.1}
    for width in (80, 120, 200):
        lines = drawn({"version": 1, "gpus": gpus, "runs": [run]}, width, None)
        (lost,), (asleep,) = ([line for line in lines if words in line] for words in ("no answer", "suspended"))
        assert lost.split()[:9] == ["✖", "5", "no", "answer", "-", "-", "-", "-", "grace"]
        assert "grace tabular-embedding" in lost
        assert asleep.split()[:3] == ["6", "suspended", "-"]
        assert any(" 3.10 " in line for line in lines)


def test_unknown_values_are_dashes() -> None:
    """An unknown value is a dash, not 0 or a free bar; runs that the daemon leaves out are counted."""
    gpu = {"index": 0, "status": "up", "memory_size_bytes": 80 << 30, "power_usage_watts": 10**400, "mig": [{}]}
    run = {"run_id": "4-2", "name": "unet", "up": True}
    box = {"version": 1, "gpus": [gpu], "runs": [run], "runs_dropped": 29}
    for height in (None, 24):
        lines = drawn(box, 80, height)
        (row,) = (line for line in lines if "-/80.0 GiB" in line)
        assert row.split() == ["0", "-/80.0", "GiB", "-", "-", "-", "-"]
        assert any(line.startswith("  0/? ") for line in lines)
        assert "  and 29 more runs" in (line.rstrip() for line in lines)
    assert len(drawn(box | {"runs": [run] * 100}, 80, 24)) == 24


def test_mig_instances_have_the_same_number_everywhere() -> None:
    """A run names a MIG instance like the instance's row: number of the GPU and of the GPU instance."""
    mig = {"uuid": "MIG-a", "gpu_instance": 7, "memory_size_bytes": 1 << 30, "headroom_run_id": "4-2"}
    gpu = {"index": 3, "uuid": "GPU-3", "status": "up", "condition": "ok", "mig": [mig]}
    run = {"run_id": "4-2", "name": "unet", "up": True, "devices": [{"uuid": "MIG-a"}, {"uuid": "GPU-3"}]}
    lines = drawn({"version": 1, "gpus": [gpu], "runs": [run]}, 80, None)
    assert next(line for line in lines if line.startswith("  3/7 ")).rstrip().endswith("unet")
    assert next(line for line in lines if line.startswith("  unet ")).split()[1] == "3/7,3"


def test_display_fits_the_height(box: Daemon) -> None:
    """A line counts what does not fit; a few events stay visible if lines are scarce."""
    answer = json.loads(fetch(f"{box.url}/api/v1/state"))
    answer["events"] = [{"text": f"event {n}"} for n in range(20)]
    for height in (1, 5, 10, 15, 24, 50):
        lines = drawn(answer, 80, height)
        assert len(lines) <= max(height, 8), height  # a terminal of less shows the top
        assert any("more GPUs" in line for line in lines) == (height < 24), height
        assert sum(" event " in line for line in lines) >= (3 if height >= 15 else 0), height
    assert len(drawn(answer | {"gpus": answer["gpus"] * 4, "runs": answer["runs"] * 9}, 80, 24)) == 24
