"""The command line as users see it: real processes, help, exit statuses and error messages."""

from __future__ import annotations

import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from commands import run_command
from offenders import check_all, listing_offenders
from services import ROOT, Daemon, Process, end_processes, wait_until

from gpuwarden._version import __version__
from gpuwarden.cli.common.entry_points import REFERENCES, load_function
from gpuwarden.cli.parser import COMMANDS, SHELLS, Command, make_parser
from mock_nvml import MockNvml

NO_DRIVER = {"LD_LIBRARY_PATH": "/nonexistent"}


def test_children_are_waited_for() -> None:
    """A command that is started with SIGCHLD ignored learns the exit status of the programs that it starts."""
    script = """if True:
        import signal, subprocess
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        from gpuwarden.cli.main import main
        main(["completion", "bash"])
        print(f"\\nstatus {subprocess.run(['false']).returncode}")
    """
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.endswith("\nstatus 1\n"), done.stderr


def test_once_prints_a_scrape(mock_nvml: MockNvml) -> None:
    """`once` prints the metrics that Prometheus would scrape, and nothing else."""
    done = run_command("once", env=mock_nvml.env(gpus=2))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("\ngpuwarden_gpu_up{") == 2


def test_once_without_a_driver() -> None:
    """Without a driver the metrics say so, the status is 1, and the message says what to do."""
    done = run_command("once", env=NO_DRIVER)
    assert done.returncode == 1
    assert "install the NVIDIA driver" in done.stderr
    assert "trying again" not in done.stderr
    assert 'gpuwarden_collector_success{collector="nvml"} 0.0' in done.stdout
    assert "gpuwarden_gpus " not in done.stdout  # not 0: the number is unknown


def test_wrong_settings_are_reported_together(tmp_path: Path) -> None:
    """Every mistake in the file and the flags is reported with its place; the status is 2."""
    config = tmp_path / "bad.yaml"
    config.write_text("poll:\n  interval: 10ms\n  intervall: 1s\nrnus:\n  max: 3\n")
    done = run_command("serve", "--config", str(config), "--listen", "nowhere")
    assert done.returncode == 2
    lines = done.stderr.splitlines()
    assert [line.removeprefix(f"{config}:").partition(": ")[0] for line in lines] == ["2:3", "3:3", "4:1", "--listen"]
    assert "did you mean interval?" in done.stderr


def test_environment_names_the_socket_unless_a_flag_does() -> None:
    """GPUWARDEN_SOCKET is checked like the option it replaces, and the flag wins over it."""
    environment = {"GPUWARDEN_SOCKET": "relative"}
    named = run_command("serve", "--listen", "nowhere", env=environment).stderr.splitlines()
    assert [line.partition(": ")[0] for line in named] == ["GPUWARDEN_SOCKET", "--listen"]
    overruled = run_command("serve", "--listen", "nowhere", "--socket", "/run/s", env=environment).stderr.splitlines()
    assert [line.partition(": ")[0] for line in overruled] == ["--listen"]


def test_environment_names_the_daemon_unless_a_flag_does() -> None:
    """GPUWARDEN_LISTEN is the address of the daemon for every command, and --listen wins over it."""
    environment = {"GPUWARDEN_LISTEN": "127.0.0.1:1"}
    assert "http://127.0.0.1:1" in run_command("runs", env=environment).stderr
    assert "http://127.0.0.1:1" in run_command("top", "--once", env=environment).stderr
    assert "http://127.0.0.1:2" in run_command("runs", "--listen", "127.0.0.1:2", env=environment).stderr
    assert run_command("runs", env={"GPUWARDEN_LISTEN": "here"}).stderr.startswith("GPUWARDEN_LISTEN: ")


def test_check_config(tmp_path: Path) -> None:
    """A correct file is OK; a missing one, or one that needs what this machine lacks, has status 2."""
    good = run_command("check-config", str(ROOT / "config.example.yaml"))
    first, second = good.stdout.splitlines()
    assert (good.returncode, first) == (0, f"{ROOT / 'config.example.yaml'}: OK")
    assert re.fullmatch(r"metrics\.profile standard: \d{4} series with 8 simulated GPUs and \d runs", second)
    small = tmp_path / "small.yaml"
    small.write_text("metrics: {profile: minimal}\nsource: nvml\nsimulation: {gpus: 2}\n", encoding="utf-8")
    counted = re.search(r"profile minimal: (\d+) series", run_command("check-config", str(small)).stdout)
    assert counted
    assert int(counted[1]) <= 200
    missing = run_command("check-config", str(tmp_path / "none.yaml"))
    assert missing.returncode == 2
    assert "no such file" in missing.stderr
    other = tmp_path / "other.yaml"
    other.write_text("source: capture:/nope\nruns: {socket_group: no-such-group}\n", encoding="utf-8")
    checked = run_command("check-config", str(other))
    assert (checked.returncode, checked.stdout) == (2, "")
    assert checked.stderr.splitlines() == [
        f"{other}: source: /nope: cannot read the capture: No such file or directory",
        f"{other}: runs.socket_group: group no-such-group does not exist: create it, or set another runs.socket_group",
    ]


def test_wrong_use_is_status_2() -> None:
    """Wrong arguments end with status 2, the usage and the command that prints help."""
    with listing_offenders() as case:
        for arguments in ("--nonsense", "serve --nonsense", "reference nothing", "check-config"):
            done = run_command(*arguments.split())
            command = "gpuwarden" if arguments.startswith("-") else f"gpuwarden {arguments.split()[0]}"
            with case(arguments):
                assert (done.returncode, done.stdout) == (2, "")
                assert done.stderr.startswith(f"usage: {command} ")
                assert done.stderr.endswith(f"\nSee: {command} --help\n")


@pytest.mark.parametrize("command", ["completion bash", "rules"])
def test_closed_output_is_discarded(command: str) -> None:
    """A command whose standard output is closed ends without a traceback."""
    ended = subprocess.run(
        ["sh", "-c", f'exec "$0" -m gpuwarden {command} >&-', sys.executable],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (0, "")


def test_locale_without_the_characters_of_a_text() -> None:
    """Characters that the locale lacks are shown as question marks."""
    shown = run_command("reference", "alerts", env={"PYTHONIOENCODING": "ascii"})
    assert "# Alerts" in shown.stdout
    assert "?" in shown.stdout
    assert shown.stdout.isascii()


SUGGESTIONS = {
    "srve": "serve",
    "check_config": "check-config",
    "--verion": "--version",
    "serve --lisen 127.0.0.1:1": "--listen",
    "serve --lisen=127.0.0.1:1": "--listen",
    "runs shw": "show",
    "runs show --jsn 4711": "--json",
    "rules --near-oom-ration 5%": "--near-oom-ratio",
    "reference metrcs": "metrics",
}


def test_misspelled_word_gets_a_suggestion() -> None:
    """A misspelled command, option or value is answered with the nearest known one."""
    with listing_offenders() as case:
        for arguments, meant in SUGGESTIONS.items():
            done = run_command(*arguments.split())
            with case(arguments):
                assert done.returncode == 2
                assert f"; did you mean {meant}?\n" in done.stderr


def test_help_fits_a_terminal() -> None:
    """Without an argument there is the help: each command with an example, within 80 columns and 24 lines."""
    done = run_command()
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == run_command("--help").stdout
    lines = done.stdout.splitlines()
    assert len(lines) < 24  # the prompt takes one
    assert max(map(len, lines)) <= 80
    for command in COMMANDS:
        assert any(line.startswith(f"  {command.name} ") and f" gpuwarden {command.name}" in line for line in lines)


@check_all({command.name: command for command in COMMANDS})
def test_help_of_a_command_ends_in_examples(command: Command) -> None:
    """The help of each command fits 80 columns, and its examples are accepted by the parser."""
    lines = run_command(command.name, "--help", env={"COLUMNS": "80"}).stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[-len(command.examples) :] == [f"  {each}" for each in command.examples]
    for example in command.examples:
        if example.startswith("gpuwarden "):
            words = shlex.split(re.split(r" [|>] ", example)[0])
            assert make_parser().parse_args(words[1:]).function


@pytest.mark.parametrize("shell", SHELLS)
def test_completion(shell: str, tmp_path: Path) -> None:
    """The completion script of each shell knows all commands, and the shell can read it."""
    done = run_command("completion", shell)
    assert (done.returncode, done.stderr) == (0, "")
    assert [command.name for command in COMMANDS if command.name not in done.stdout] == []
    if program := shutil.which(shell):
        script = tmp_path / "script"
        script.write_text(done.stdout)
        subprocess.run([program, "-n", script], check=True, timeout=60)


def test_completion_of_bash() -> None:
    """Bash completes commands, options and values."""
    source = run_command("completion", "bash").stdout
    for words, expected in (
        (["gpuwarden", "ser"], ["serve"]),
        (["gpuwarden", "runs", "sh"], ["show"]),
        (["gpuwarden", "serve", "--li"], ["--listen"]),
        (["gpuwarden", "completion", "z"], ["zsh"]),
    ):
        position = f"COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}"
        call = "$(complete -p gpuwarden | sed 's/.*-F //; s/ .*//') gpuwarden"
        script = f'{source}\n{position}\n{call}\nprintf "%s\\n" "${{COMPREPLY[@]}}"'
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60, check=True)
        assert [each.strip() for each in done.stdout.splitlines()] == expected


def test_man_page(tmp_path: Path) -> None:
    """The man page has all commands and examples, and man accepts it without a warning."""
    pytest.importorskip("argparse_manpage")
    page = subprocess.run([sys.executable, "tools/man_page.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    for command in COMMANDS:
        assert command.examples[0].replace("-", r"\-") in page.stdout
    file = tmp_path / "gpuwarden.1"
    file.write_text(page.stdout)
    if groff := shutil.which("groff"):
        done = subprocess.run([groff, "-man", "-ww", "-z", file], capture_output=True, text=True, check=True)
        assert done.stderr == ""
    if mandoc := shutil.which("mandoc"):
        subprocess.run([mandoc, "-T", "lint", "-W", "warning", file], check=True)


def test_version() -> None:
    """--version prints the package's version, which is the newest in the changelog."""
    assert run_command("--version").stdout == f"gpuwarden {__version__}\n"
    newest = re.search(r"^## \[?([\d.]+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest[1] == __version__


def test_files_of_the_working_folder_are_not_imported(tmp_path: Path) -> None:
    """A program's own random.py, json.py and logging.py do not end `python -m gpuwarden` in its folder."""
    for name in ("random", "json", "logging", "argparse", "socket"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported')")
    command = [sys.executable, "-m", "gpuwarden", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path)
    assert '"python.shadows"' in done.stdout, done.stderr


REFERENCE_PAGES = {"config": "configuration", "xid": "xids", "api": "http-api"}


@check_all(
    {name: (name, REFERENCE_PAGES.get(name, name)) for name in (*REFERENCE_PAGES, "cli", "metrics", "dcgm", "doctor")}
)
def test_reference_is_up_to_date(names: tuple[str, str]) -> None:
    """The committed reference is what the code prints; `make docs` updates it."""
    name, file = names
    assert (ROOT / "docs/reference" / f"{file}.md").read_text() == run_command("reference", name).stdout


def test_rules_of_diagnoses_are_in_step() -> None:
    """The page on out-of-memory diagnoses ends with the rules that the code prints."""
    assert (
        (ROOT / "docs/understand/oom-diagnosis.md")
        .read_text()
        .endswith("\n" + run_command("reference", "diagnoses").stdout)
    )


def test_port_taken(tmp_path: Path, mock_nvml: MockNvml) -> None:
    """A port in use is an error with status 1."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        done = run_command("serve", "--listen", address, "--socket", str(tmp_path / "run.sock"), env=mock_nvml.env())
    assert done.returncode == 1
    assert address in done.stderr
    assert "choose another port" in done.stderr


def test_second_daemon_on_the_socket(tmp_path: Path, mock_nvml: MockNvml) -> None:
    """A second daemon on the same socket has status 1 and leaves the first alone; a stale socket is replaced."""
    first = Daemon(tmp_path, env=mock_nvml.env(gpus=1))
    with end_processes(first):
        second = run_command(
            "serve", "--listen", "127.0.0.1:0", "--socket", str(first.socket), env=mock_nvml.env(gpus=1)
        )
        assert second.returncode == 1
        assert "another daemon listens on" in second.stderr
        assert "gpuwarden_gpu_up" in first.page()
        first.kill(signal.SIGKILL)
        assert first.socket.exists()
        third = Daemon(tmp_path, env=mock_nvml.env(gpus=1))
        with end_processes(third):
            assert "gpuwarden_gpu_up" in third.page()


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_the_daemon(tmp_path: Path, mock_nvml: MockNvml, how: signal.Signals) -> None:
    """SIGTERM and Ctrl-C end the daemon with status 0 and remove the socket, even while the driver hangs."""
    daemon = Daemon(tmp_path, env=mock_nvml.env(gpus=2))
    with end_processes(daemon):
        mock_nvml.hang("*")
        wait_until(lambda: "timeout" in daemon.page(), "the hang seen")
        assert daemon.kill(how) == 0
        assert not daemon.socket.exists()
        assert "Traceback" not in daemon.output()


def test_driver_without_gpus(tmp_path: Path, mock_nvml: MockNvml) -> None:
    """A driver without GPUs is a count of 0 and a log line; there are no series of GPUs."""
    daemon = Daemon(tmp_path, env=mock_nvml.env(gpus=0))
    with end_processes(daemon):
        page = daemon.page()
        assert "\ngpuwarden_gpus 0.0" in page
        assert "gpuwarden_gpu_up{" not in page
        assert "driver lists no GPU" in daemon.output()


def test_serve_without_a_driver_retries(tmp_path: Path) -> None:
    """The log says that the daemon retries, so that a restart is not needed."""
    daemon = Daemon(tmp_path, "--source", "nvml", env=NO_DRIVER)
    with end_processes(daemon):
        assert "install the NVIDIA driver, in a container pass the GPUs" in daemon.output()
        assert "retrying driver interval_seconds=5" in daemon.output()


def test_auto_without_a_driver_simulates(tmp_path: Path) -> None:
    """`auto` without a driver simulates GPUs, with a warning in the log and a label in the metrics."""
    daemon = Daemon(tmp_path, "--source", "auto", env=NO_DRIVER)
    with end_processes(daemon):
        assert "SIMULATED" in daemon.output()
        assert 'gpuwarden_source_info{source="simulated"} 1.0' in daemon.page()


def test_capture_is_replayed(tmp_path: Path, mock_nvml: MockNvml) -> None:
    """`--source capture:FILE` has the same metrics as the driver that `capture` recorded."""
    file = tmp_path / "box.json"
    done = run_command("capture", "--frames", "1", str(file), env=mock_nvml.env(gpus=2, frozen=1))
    assert (done.returncode, done.stderr) == (0, "")
    live = run_command("once", env=mock_nvml.env(gpus=2, frozen=1)).stdout
    replayed = run_command("once", "--source", f"capture:{file}", env=NO_DRIVER).stdout
    assert _gpu_lines(replayed) == _gpu_lines(live)
    assert len(_gpu_lines(live)) > 50


def test_capture_to_a_missing_folder(tmp_path: Path) -> None:
    """A file that cannot be written is an error before the first frame, with its name and status 1."""
    file = tmp_path / "missing" / "box.json"
    done = run_command("capture", "--source", "simulated", "--frames", "1", str(file))
    assert (done.returncode, done.stderr) == (
        1,
        f"gpuwarden: cannot write {file}: its folder does not exist or is not writable\n",
    )


def test_capture_to_a_folder(tmp_path: Path) -> None:
    """A folder in place of the file is an error before the first frame."""
    done = run_command("capture", "--source", "simulated", "--frames", "600", str(tmp_path))
    assert (done.returncode, done.stderr) == (
        1,
        f"gpuwarden: cannot write {tmp_path}: it is a folder; name a file in it\n",
    )


def test_wrong_use_of_capture_is_status_2(tmp_path: Path) -> None:
    """Wrong numbers have status 2 and one line."""
    for wrong in (["--frames", "0"], ["--interval", "-1"], ["--interval", "nan"]):
        done = run_command("capture", "--source", "simulated", *wrong, str(tmp_path / "box.json"))
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), wrong


def test_capture_of_a_hanging_driver_can_be_interrupted(tmp_path: Path, mock_nvml: MockNvml) -> None:
    """Ctrl-C ends a capture even in a driver call that does not return."""
    mock_nvml.hang("*")
    command = [sys.executable, "-m", "gpuwarden", "capture", str(tmp_path / "box.json")]
    process = Process(command, tmp_path / "log", mock_nvml.env(gpus=2))
    with end_processes(process):
        wait_until(lambda: mock_nvml.calls().get("nvmlInit_v2"), "the call that hangs")
        process.popen.send_signal(signal.SIGINT)
        assert process.popen.wait(60) != 0


def _gpu_lines(page: str) -> list[str]:
    return [line for line in page.splitlines() if line.startswith("gpuwarden_gpu_") and "timestamp" not in line]


def test_wrong_capture_is_an_error(tmp_path: Path) -> None:
    """A file that is not a capture has status 1 and one line that names it; tests/capture has more such files."""
    file = tmp_path / "wrong.json"
    file.write_text('{"format": 99}')
    done = run_command("once", "--source", f"capture:{file}")
    assert done.returncode == 1
    assert str(file) in done.stderr
    assert "Traceback" not in done.stderr


def test_entry_points_exist() -> None:
    """Every command and every reference has its function."""
    for entry_point in [*(command.function for command in COMMANDS), *REFERENCES.values()]:
        assert callable(load_function(entry_point)), entry_point
