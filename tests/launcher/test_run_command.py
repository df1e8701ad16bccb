"""`gpuwarden run` around real programs, with a private daemon."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import run_command
from pseudo_terminal import terminal
from services import Daemon, Process, end_processes, wait_until

from gpuwarden.cli.common.api_client import fetch_json
from gpuwarden.cli.parser import parse
from gpuwarden.launcher import run_command as launcher
from gpuwarden.web.api.api_paths import RUNS
from mock_nvml import MockNvml

GUARDED = """
import signal, sys
seen = []
signal.signal(signal.SIGUSR1, lambda *_: seen.append(1))
print("ready", flush=True)
while not seen:
    signal.pause()
sys.exit(3)
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Return an environment without a daemon of this machine."""
    return {"GPUWARDEN_SOCKET": str(tmp_path / "none.sock"), "TMPDIR": str(tmp_path)}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """Start a daemon of this machine, for tests of what needs no private one."""
    daemon = Daemon(tmp_path_factory.mktemp("machine") / "daemon", "--source", "simulated")
    with end_processes(daemon):
        wait_until(lambda: daemon.samples().text, "a page")
        yield daemon


@pytest.fixture
def shared(daemon: Daemon) -> dict[str, str]:
    """Return an environment with the daemon of this machine."""
    return {"GPUWARDEN_SOCKET": str(daemon.socket)}


def launch(environment: dict[str, str], *arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    """Run `gpuwarden run ARGUMENTS` to its end, with a text as its input."""
    return run_command("run", *arguments, env=environment, text=text)


def rows(card: str) -> dict[str, str]:
    """Return the rows of a printed card, unwrapped."""
    found: dict[str, str] = {}
    label = ""
    for line in card.splitlines():
        label = line[:12].strip() or label
        found[label] = f"{found.get(label, '')} {line[12:]}".strip()
    return found


def test_output_and_status_are_the_programs(environment: dict[str, str], tmp_path: Path) -> None:
    """Standard input, output and exit status pass through; the card is on standard error, and nothing is left."""
    ended = launch(environment, "--", "sh", "-c", "cat; echo of the program >&2; exit 7", text="given\n")
    assert (ended.returncode, ended.stdout) == (7, "given\n")
    assert ended.stderr.startswith("of the program\n\ngpuwarden run, started ")
    assert rows(ended.stderr)["outcome"].startswith("failed after ")
    assert "(exit status 7)" in rows(ended.stderr)["outcome"]
    assert "`gpuwarden explain`" in rows(ended.stderr)["next step"]
    assert list(tmp_path.iterdir()) == []


def test_private_daemon_imports_nothing_of_the_program(
    environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A types.py in the folder of the program does not end the daemon, which measures the program's memory."""
    (tmp_path / "types.py").write_text("raise SystemExit('imported')")
    monkeypatch.chdir(tmp_path)
    command = ["gpuwarden", "run", "--", "sh", "-c", "echo ready; read line"]
    launched = Process(command, tmp_path / "log", environment)
    with end_processes(launched):
        wait_until(lambda: "ready" in launched.output(), "the program")
        wait_until(lambda: any(each.get("host_memory_peak_bytes") for each in live_runs(tmp_path)), "its memory")
        launched.send_line("end")
        assert launched.popen.wait(60) == 0
        assert "peak" in rows(launched.output())["host memory"]


@pytest.mark.parametrize(
    ("number", "outcome", "cause"),
    [
        (signal.SIGKILL, "killed", "Process killed by a signal"),
        (signal.SIGSEGV, "crashed", "Crash in native code"),
        (signal.SIGBUS, "crashed", "Access to mapped memory that nothing backs"),
        (signal.SIGTERM, "killed", "Process killed by a signal"),
    ],
)
def test_death_by_signal(number: signal.Signals, outcome: str, cause: str, shared: dict[str, str]) -> None:
    """A signal that ends the program ends the command too, and the card says what it means."""
    ended = launch(shared, "--", sys.executable, "-c", f"import os; os.kill(os.getpid(), {number})")
    assert ended.returncode == -number
    card = rows(ended.stderr)
    assert card["outcome"].startswith(f"{outcome} after ")
    assert f"ended by {number.name}" in card["outcome"]
    assert card["cause"].startswith(cause)
    assert card["next step"]


def test_place_of_a_crash(shared: dict[str, str], tmp_path: Path) -> None:
    """The card has the Python line of a crash in native code."""
    program = tmp_path / "train.py"
    program.write_text("import ctypes\ndef step():\n    ctypes.string_at(0)\nstep()\n")
    card = rows(launch(shared, "--", sys.executable, str(program)).stderr)
    assert card["cause"].startswith("Crash in native code")
    assert card["at"].replace(" ", "").endswith("train.py:3instep")


def test_interrupt(shared: dict[str, str]) -> None:
    """A Python program that an interrupt ends does so by the signal itself, as without the command."""
    ended = launch(shared, "--", sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGINT)")
    assert ended.returncode == -signal.SIGINT
    assert rows(ended.stderr)["outcome"].endswith("(ended by SIGINT)")


@pytest.mark.slow
def test_death_by_nameless_signal(environment: dict[str, str]) -> None:
    """A real-time signal, which Python has no name for, ends the command too."""
    ended = launch(environment, "--", "sh", "-c", "kill -37 $$")
    assert ended.returncode == -37
    assert "(ended by signal 37)" in rows(ended.stderr)["outcome"]


def test_signals_are_passed_on(shared: dict[str, str], tmp_path: Path) -> None:
    """A signal to the command reaches the program, which decides what it means."""
    command = ["gpuwarden", "run", "--", sys.executable, "-c", GUARDED]
    launched = Process(command, tmp_path / "log", shared)
    with end_processes(launched):
        wait_until(lambda: "ready" in launched.output(), "the program")
        launched.popen.send_signal(signal.SIGUSR1)
        assert launched.popen.wait(60) == 3


def test_killed_command_leaves_no_daemon(environment: dict[str, str], tmp_path: Path) -> None:
    """The private daemon ends with the command, even if that is killed."""
    command = ["gpuwarden", "run", "--", sys.executable, "-c", GUARDED]
    launched = Process(command, tmp_path / "log", environment)
    with end_processes(launched):
        wait_until(lambda: "ready" in launched.output(), "the program")
        (socket,) = tmp_path.glob("gpuwarden-run-*/run.sock")
        children = Path(f"/proc/{launched.pid}/task/{launched.pid}/children").read_text().split()
        launched.popen.kill()
        launched.popen.wait()
        program = [pid for pid in children if GUARDED.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()]
        for pid in program:
            os.kill(int(pid), signal.SIGKILL)
        wait_until(lambda: not socket.exists(), "the daemon's end")


def test_python_error(shared: dict[str, str], tmp_path: Path) -> None:
    """The card has the error of a program that reports by itself, with its own line; in all formats."""
    script = tmp_path / "train.py"
    script.write_text(
        "from gpuwarden import watch\n"
        "with watch() as run:\n"
        "    for _ in range(3):\n"
        "        run.step(batch_size=4)\n"
        "    raise ValueError('expected min_ndim=3, found ndim=2')\n"
    )
    for suffix in ("json", "txt"):
        path = tmp_path / f"card.{suffix}"
        ended = launch(shared, "--card", str(path), "--", sys.executable, str(script))
        assert ended.returncode == 1
        assert rows(ended.stderr)["steps"].startswith("3")
        at = rows(ended.stderr)["at"].replace(" ", "")  # a long path is wrapped
        assert f"{script}:5" in at
        text = path.read_text()
        assert "expected min_ndim=3" in text
    card = json.loads((tmp_path / "card.json").read_text())
    assert (card["outcome"], card["exit_status"], card["problem"]) == ("failed", 1, "shape_mismatch")
    (run,) = card["runs"]
    assert (run["name"], run["steps"], run["pid"]) == ("train.py", 3, card["pid"])


def test_name(shared: dict[str, str], tmp_path: Path) -> None:
    """A name given to the command is that of a program that counts steps too; by default it is the script's."""
    path, script = tmp_path / "card.json", tmp_path / "train.py"
    script.write_text("from gpuwarden import watch\nwith watch() as run:\n    run.step()\n")
    for name, options in (("mine", ["--name", "mine"]), ("train.py", [])):
        launch(shared, *options, "--card", str(path), "--", sys.executable, str(script))
        (run,) = json.loads(path.read_text())["runs"]
        assert run["name"] == name


@pytest.mark.parametrize("name", [pytest.param("short", marks=pytest.mark.slow), "x" * 100])
def test_program_that_ends_at_once(environment: dict[str, str], tmp_path: Path, name: str) -> None:
    """It has its run on the card, also where the path of TMPDIR is too long for a socket in it."""
    path, folder = tmp_path / "card.json", tmp_path / name
    folder.mkdir()
    ended = launch({**environment, "TMPDIR": str(folder)}, "--card", str(path), "--", "true")
    assert "no daemon" not in ended.stderr
    (run,) = json.loads(path.read_text())["runs"]
    assert (run["name"], run["outcome"]) == ("true", "finished")


@pytest.mark.slow
def test_prompt(environment: dict[str, str]) -> None:
    """An error at Python's prompt, or in a script before it, is no cause of a later end without error."""
    for arguments, lines in ((["-i"], "{}['gone']\n"), (["-i", "-c", "{}['gone']"], "")):
        ended = launch(environment, "--", sys.executable, *arguments, text=lines)
        assert "KeyError: 'gone'" in ended.stderr
        assert rows(ended.stderr)["outcome"].startswith("finished")
        assert "cause" not in rows(ended.stderr)


@pytest.mark.slow
def test_run_within_a_run(environment: dict[str, str]) -> None:
    """Both cards have the error."""
    script = [sys.executable, "-c", "{}['gone']"]
    ended = launch(environment, "--", sys.executable, "-m", "gpuwarden", "run", "--", *script)
    inner, outer = ended.stderr.split("gpuwarden run, started ")[1:]
    assert rows(inner)["message"] == rows(outer)["message"] == "KeyError: 'gone'"


def test_no_steps(shared: dict[str, str], tmp_path: Path) -> None:
    """The card of a program whose steps nothing counted says how to get them; its run has none in the record."""
    path = tmp_path / "card.json"
    ended = launch(shared, "--card", str(path), "--", sys.executable, "-c", "pass")
    assert rows(ended.stderr)["steps"].endswith("other loops need gpuwarden.watch()")
    (run,) = json.loads(path.read_text())["runs"]
    assert "steps" not in run


def test_gpus_of_any_program(environment: dict[str, str], mock_nvml: MockNvml, tmp_path: Path) -> None:
    """A program that reports nothing has its GPU memory, and an XID, on the card."""
    env = {**environment, **mock_nvml.env(gpus=2)}
    path = tmp_path / "card.json"
    command = ["sh", "-c", "echo pid $$; read line; exit 9"]
    launched = Process(["gpuwarden", "run", "--card", str(path), "--", *command], tmp_path / "log", env)
    with end_processes(launched):
        wait_until(lambda: launched.output().endswith("\n"), "the program")
        pid = launched.output().split()[-1]
        mock_nvml.processes(1, {int(pid): 3 << 30})
        wait_until(
            lambda: any(each["pid"] == int(pid) and each.get("gpu_seconds") for each in live_runs(tmp_path)),
            "its time on the GPU",
        )
        launched.send_line("end")
        assert launched.popen.wait(60) == 9
    (run,) = json.loads(path.read_text())["runs"]
    assert (run["name"], run["framework"], run["outcome"]) == ("sh", "sh", "failed")
    (device,) = run["devices"]
    assert device["gpu_seconds"] > 0


def live_runs(folder: Path) -> list[dict[str, Any]]:
    """Return the running runs of the private daemon whose folder is in this one."""
    (api,) = folder.glob("gpuwarden-run-*/api.sock")
    found: list[dict[str, Any]] = fetch_json(api, RUNS)["live"]
    return found


def test_daemon_of_the_machine(daemon: Daemon, shared: dict[str, str], tmp_path: Path) -> None:
    """A daemon that answers is used, and shows the run; other runs are not on the card."""
    path = tmp_path / "card.json"
    ended = launch(shared, "--name", "mine", "--card", str(path), "--", "true")
    assert ended.returncode == 0
    (run,) = json.loads(path.read_text())["runs"]
    assert (run["name"], run["outcome"]) == ("mine", "finished")
    wait_until(lambda: daemon.samples().all("gpuwarden_run_info", run_name="mine"), "the run on the page")


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (["--", "gpuwarden-no-such-program"], 127, "gpuwarden-no-such-program: command not found"),
        (["--", "/etc/passwd"], 126, "cannot run /etc/passwd: Permission denied"),
        (["--", "/no/such/program"], 127, "cannot run /no/such/program: No such file"),
        ([], 2, "no program; write it after --"),
        (["--card", "card.pdf", "--", "true"], 2, "unknown format; end its name with .json or .txt"),
        (
            ["--card", "/no/such/card.txt", "--", "echo", "started"],
            2,
            "cannot write /no/such/card.txt: its folder does not",
        ),
        (
            ["--card", "/etc/passwd/card.txt", "--", "echo", "started"],
            2,
            "cannot write /etc/passwd/card.txt: its folder",
        ),
    ],
)
def test_wrong_use(arguments: list[str], status: int, text: str, shared: dict[str, str]) -> None:
    """A program that cannot be run has a shell's exit status, with what is wrong."""
    ended = launch(shared, *arguments)
    assert ended.returncode == status
    assert text in ended.stderr
    assert "Traceback" not in ended.stderr
    assert ended.stdout == ""


def test_no_run_without_a_program(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A command that is not found starts no daemon and says hello to none."""
    monkeypatch.setattr(launcher, "private_folder", lambda: pytest.fail("a run was made"))
    assert launcher.run(parse(["run", "--", "gpuwarden-no-such-program"])) == 127
    assert capsys.readouterr().err == "gpuwarden run: gpuwarden-no-such-program: command not found\n"


def test_files_of_the_program_do_not_run_in_the_command(shared: dict[str, str], tmp_path: Path) -> None:
    """A types.py and a sitecustomize in PYTHONPATH are the program's, and its environment is as before them."""
    (tmp_path / "types.py").write_text("raise SystemExit('imported')")
    (tmp_path / "sitecustomize.py").write_text("import os\nos.environ['CHANGED'] = '1'\n")
    ended = subprocess.run(
        [
            sys.executable,
            "-c",
            "from gpuwarden.__main__ import start; start()",
            "run",
            "--",
            "sh",
            "-c",
            "echo $CHANGED.",
        ],
        env=os.environ | shared | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (0, ".\n")
    assert rows(ended.stderr)["outcome"].startswith("finished")


def test_program_where_no_file_can_be_written(shared: dict[str, str]) -> None:
    """It runs unwatched, with the reason."""
    limited = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))"
    ended = subprocess.run(
        [
            *(sys.executable, "-c", f"{limited}; from gpuwarden.__main__ import start; start()"),
            *("run", "--", "sh", "-c", "echo ran; exit 3"),
        ],
        env=os.environ | shared,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (3, "ran\n")
    assert ended.stderr.startswith("gpuwarden run: the program runs unwatched: No usable temporary directory")


def test_card_that_cannot_be_written(shared: dict[str, str], tmp_path: Path) -> None:
    """The card is printed all the same, and the exit status is the program's, which removed the folder."""
    folder = tmp_path / "cards"
    folder.mkdir()
    ended = launch(shared, "--card", str(folder / "card.txt"), "--", "rmdir", str(folder))
    assert ended.returncode == 0
    assert "cannot write the card" in ended.stderr
    assert rows(ended.stderr)["outcome"].startswith("finished")


def test_output_that_nobody_reads(shared: dict[str, str]) -> None:
    """The exit status is the program's, also where the card cannot be printed."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "gpuwarden", "run", "--", "sh", "-c", "exit 5"]
    ended = subprocess.run(command, env=os.environ | shared, stderr=writer, timeout=60, check=False)
    os.close(writer)
    assert ended.returncode == 5


@pytest.mark.slow
def test_hostile_names(environment: dict[str, str], tmp_path: Path) -> None:
    """Neither a name of any length nor one that is no text keeps a program from running, or its card from a file."""
    path = tmp_path / "card.txt"
    script = tmp_path / os.fsdecode(b"\xff\x1b[31m.sh")
    script.write_text("#!/bin/sh\necho ran\n")
    script.chmod(0o700)
    ended = launch(environment, "--card", str(path), "--name", "x" * 100_000, "--", str(script))
    assert (ended.returncode, ended.stdout) == (0, "ran\n")
    assert "\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}[31m.sh" in path.read_text(encoding="utf-8")


@pytest.mark.slow
def test_signals_after_the_program(environment: dict[str, str], tmp_path: Path) -> None:
    """A second Ctrl-C, or a signal to end, while the card is made: it comes, nothing is left, and the status stays."""
    script = "for p in $(cat /proc/$PPID/task/$PPID/children); do [ $p = $$ ] || kill -STOP $p; done; exit 4"
    command = ["gpuwarden", "run", "--", "sh", "-c", script]
    launched = Process(command, tmp_path / "log", environment)
    with end_processes(launched):
        wait_until(lambda: any(_state(each) == "T" for each in _children(launched.pid)), "the daemon stops")
        wait_until(lambda: "sh" not in _commands(launched.pid), "the program's end")
        for number in (signal.SIGINT, signal.SIGINT, signal.SIGTERM):
            launched.popen.send_signal(number)
        assert launched.popen.wait(60) == 4
    assert "exit status 4" in launched.output()
    assert not list(tmp_path.glob("gpuwarden-run-*"))


COUNTING = """
import signal, sys, time
seen = []
signal.signal(signal.SIGINT, lambda *_: seen.append(1))
print("ready", sys.stdout.isatty(), flush=True)
while not seen:
    time.sleep(0.05)
time.sleep(0.5)
print("interrupts", len(seen), flush=True)
"""


def test_terminal(shared: dict[str, str]) -> None:
    """The program has the terminal itself; Ctrl-C reaches it once, and the card fits the width."""
    with terminal("run", "--", sys.executable, "-c", COUNTING, env=shared) as screen:
        screen.wait_until(lambda text: "ready True" in text, "the program")
        screen.press(b"\x03")
        screen.wait_until(lambda text: "interrupts 1" in text, "one interrupt")
        assert screen.wait() == 0
        assert any(line.startswith("outcome     finished after") for line in screen.lines())


@pytest.mark.slow
def test_stop_and_continue(environment: dict[str, str], tmp_path: Path) -> None:
    """When the program stops, as by Ctrl-Z, the command stops too, so that a shell can continue the job."""
    with (tmp_path / "log").open("wb") as log:
        launched = subprocess.Popen(
            [sys.executable, "-m", "gpuwarden", "run", "--", "sleep", "3"],
            env=os.environ | environment,
            stderr=log,
            preexec_fn=os.setpgrp,  # noqa: PLW1509 - one call; as a shell makes a job
        )
    with launched, contextlib.ExitStack() as at_end:
        at_end.callback(launched.kill)
        wait_until(lambda: "sleep" in _commands(launched.pid), "the program")
        os.killpg(launched.pid, signal.SIGTSTP)
        wait_until(lambda: _state(launched.pid) == "T", "the command stops")
        os.killpg(launched.pid, signal.SIGCONT)
        assert launched.wait(60) == 0


@pytest.mark.slow
def test_program_that_stops_itself(environment: dict[str, str]) -> None:
    """In the foreground of a terminal the command stops too, by SIGSTOP as well, so that its shell goes on."""
    with terminal("run", "--", "sh", "-c", "kill -STOP $$; echo went on", env=environment) as screen:
        wait_until(lambda: _state(screen.process.pid) == "T", "the command stops")
        os.killpg(screen.process.pid, signal.SIGCONT)
        screen.wait_until(lambda text: "went on" in text, "the program")
        assert screen.wait() == 0


def _children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _commands(pid: int) -> list[str]:
    return [Path(f"/proc/{each}/comm").read_text().strip() for each in _children(pid)]


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
