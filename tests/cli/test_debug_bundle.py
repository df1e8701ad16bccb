"""`gpuwarden debug-bundle`: what is in the file, and what is not."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from commands import COMMAND, run_command
from services import Daemon, end_processes, wait_until
from stand_in_server import serve_answers

from gpuwarden.capture.capture_file import load_capture
from gpuwarden.capture.masking import UNMASKED

PAGE = Path(__file__).parents[2] / "docs/use/debug-bundle.md"
SECRET = "https://hooks.example.org/T0/very-secret-token"  # noqa: S105 - of this test
NAME_WITH_QUOTES = 'private "hopper" \\plan'
PRIVATE_LOG = """\
cannot read /home/ada/model.keras on {host}: GPU-51300000-0000-4000-8000-000000000003
run error run=4711-99 name="my net" kind=other steps=7 error="ValueError: \\"salary\\" of Ms. Hopper" cause=2
run ended run=4711-99 name=net outcome=failed"""


def bundle(folder: Path, config: Path, *arguments: str) -> tuple[dict[str, str], str]:
    """Return the files of a bundle, and what the command prints."""
    journal = folder / "bin/journalctl"
    journal.parent.mkdir()
    journal.write_text(f"#!/bin/sh\ncat <<'END'\n{PRIVATE_LOG.format(host=socket.gethostname())}\nEND\n")
    journal.chmod(0o755)
    path = folder / "bundle.tar.gz"
    env = {"PATH": f"{journal.parent}:{os.environ['PATH']}", "GPUWARDEN_SOCKET": ""}
    done = run_command("debug-bundle", str(path), "--config", str(config), *arguments, env=env)
    assert (done.returncode, done.stderr) == (0, "")
    assert path.stat().st_mode & 0o777 == 0o600
    with tarfile.open(path) as archive:
        members = {Path(each.name).name: archive.extractfile(each) for each in archive.getmembers()}
        return {name: file.read().decode() for name, file in members.items() if file}, done.stdout


def settings(folder: Path, socket_path: Path, *more: str) -> Path:
    """Write a configuration with secrets."""
    path = folder / "config.yaml"
    lines = ("source: simulated", f"runs: {{socket: {socket_path}}}", f'notify: {{webhook: ["{SECRET}"]}}', *more)
    path.write_text("\n".join(lines))
    return path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, str], str, str]:
    """Return the files of a bundle of a running daemon, what was printed, and the daemon's metrics."""
    folder = tmp_path_factory.mktemp("bundle")
    daemon = Daemon(folder / "daemon", "--source", "simulated")
    with end_processes(daemon):
        wait_until(lambda: daemon.samples().all("gpuwarden_run_info"), "the runs")
        return *bundle(folder, settings(folder, daemon.socket), "--capture"), daemon.page()


def test_contents(made: tuple[dict[str, str], str, str]) -> None:
    """It has the texts of a bug report, and lists them with what is not masked."""
    files, printed, _ = made
    assert [*files] == [
        "version.txt",
        "config.txt",
        "daemon.log",
        "scrape.txt",
        "state.json",
        "doctor.json",
        "capture.json",
    ]
    assert all(f"  {name} " in printed for name in files)
    assert f"Not masked: {UNMASKED}. Read the files" in printed
    assert f"Not masked: {UNMASKED}. Read the files" in " ".join(PAGE.read_text().split())
    assert re.search(r"^gpuwarden \d", files["version.txt"])
    assert "poll.interval: 1.0\n" in files["config.txt"]
    assert "gpuwarden_gpu_up{" in files["scrape.txt"]
    assert json.loads(files["state.json"])["gpus"]
    assert {each["status"] for each in json.loads(files["doctor.json"])} <= {"pass", "warn", "fail", "skip"}


def test_what_identifies_is_masked(made: tuple[dict[str, str], str, str]) -> None:
    """Neither secrets nor names, serial numbers, UUIDs and paths of this machine are in any file."""
    files, _, page = made
    labels = ("user", "run_name", "systemd_unit", "uuid", "serial", "pci_bus_id")
    private = {name for label in labels for name in re.findall(rf'\b{label}="([^"]+)"', page)} - {"root"}
    assert len(private) > 20
    whole = "\n".join(files.values())
    private |= {SECRET, "very-secret-token", "/home/ada", socket.gethostname()}
    assert not set(re.findall(rf"(?<![\w-])(?:{'|'.join(map(re.escape, private))})(?![\w-])", whole))
    first, second, third = files["daemon.log"].splitlines()
    assert re.fullmatch(r"cannot read PATH-\d+ on NAME-\d+: GPU-0{8}\S+", first)
    assert second == "run error run=4711-99 name=[hidden] kind=other steps=7 error=[hidden] cause=2"
    assert third == "run ended run=4711-99 name=[hidden] outcome=failed"


def test_masks_agree(made: tuple[dict[str, str], str, str], tmp_path: Path) -> None:
    """A GPU has one masked UUID in all files; the capture can be replayed."""
    files, _, _ = made
    (tmp_path / "capture.json").write_text(files["capture.json"])
    frames = load_capture(tmp_path / "capture.json").frames
    uuids = {str(gpu["nvmlDeviceGetUUID"]) for gpu in frames[-1].gpus}
    assert uuids == {gpu["uuid"] for gpu in json.loads(files["state.json"])["gpus"]}
    assert all(f'uuid="{uuid}"' in files["scrape.txt"] for uuid in uuids)


def test_names_with_quotes(tmp_path: Path) -> None:
    """A run's name is masked also where the files escape its quotes and backslashes, and so is its job's.

    So is the former name of the process, which only an event has.
    """
    daemon = Daemon(tmp_path / "daemon", "--source", "simulated")
    with end_processes(daemon):
        program = (
            "import sys, gpuwarden\n"
            "for name in sys.argv[1:]:\n"
            "    with gpuwarden.watch(name) as run: run.step(); input()"
        )
        env = {**os.environ, "GPUWARDEN_SOCKET": str(daemon.socket), "TORCHELASTIC_RUN_ID": "job-of-hopper"}
        command = [sys.executable, "-c", program, "former hopper", NAME_WITH_QUOTES]
        with subprocess.Popen(command, env=env, stdin=subprocess.PIPE) as process:
            assert process.stdin
            wait_until(lambda: "former hopper" in daemon.page(), "the first name")
            process.stdin.write(b"\n")
            process.stdin.flush()
            wait_until(lambda: "plan" in daemon.page(), "the second name")
            files, _ = bundle(tmp_path, settings(tmp_path, daemon.socket))
            process.communicate(b"\n")
    assert not re.findall("hopper|private", "\n".join(files.values()))


@pytest.mark.parametrize("name", ["target", "link"])
def test_existing_files_are_kept(tmp_path: Path, name: str) -> None:
    """Neither an existing file nor the target of a link, which another user could read, is written."""
    target, path = tmp_path / "target", tmp_path / name
    target.write_text("of another user")
    (tmp_path / "link").symlink_to(target)
    done = run_command("debug-bundle", str(path), "--config", str(settings(tmp_path, tmp_path / "run.sock")))
    assert (done.returncode, done.stderr) == (1, f"gpuwarden: {path}: File exists\n")
    assert target.read_text() == "of another user"


def test_full_disk(tmp_path: Path) -> None:
    """An archive that cannot be written whole is removed."""
    path = tmp_path / "bundle.tar.gz"
    command = [*COMMAND, "debug-bundle", str(path), "--config", str(settings(tmp_path, tmp_path / "run.sock"))]
    done = subprocess.run(["prlimit", "--fsize=512", *command], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (1, f"gpuwarden: {path}: File too large\n")
    assert not path.exists()


def test_wrong_configuration(tmp_path: Path) -> None:
    """The problems of a configuration are in the bundle, with the options that are valid; all else is there too."""
    config = settings(tmp_path, tmp_path / "run.sock", "poll: {interval: 0s}", 'web: {listen: "127.0.0.1:1"}')
    files, _ = bundle(tmp_path, config, "--capture")
    problem, *options = files["config.txt"].splitlines()
    assert re.fullmatch(r"PATH-\d+:4:\d+: poll\.interval: 0s is too short.*", problem)
    assert {"poll.interval: 1.0", "web.listen: 127.0.0.1:1"} <= set(options)
    assert files["state.json"].startswith("not available: no daemon answers at http://127.0.0.1:1")
    assert json.loads(files["capture.json"])["frames"]


def test_missing_configuration(tmp_path: Path) -> None:
    """A file that is not there is said in the bundle."""
    files, _ = bundle(tmp_path, tmp_path / "none.yaml")
    assert re.match(r"PATH-\d+: no such file\n", files["config.txt"])


def test_without_a_daemon(tmp_path: Path) -> None:
    """Without a daemon the other files are there, masked, and the missing ones say why."""
    config = settings(
        tmp_path,
        tmp_path / "run.sock",
        'web: {listen: "127.0.0.1:1", allowed_hosts: gpu.hopper.example}',
        "alertmanager: {url: http://hopper/, instance: hopper1, labels: cluster=hopper2, user: hopper3,"
        " password: file:/etc/password}",
    )
    files, _ = bundle(tmp_path, config)
    assert "hopper" not in files["config.txt"]
    assert "capture.json" not in files
    for name in ("scrape.txt", "state.json"):
        assert files[name].startswith("not available: no daemon answers at http://127.0.0.1:1")
    assert files["doctor.json"].startswith("[")


@pytest.mark.parametrize(
    "answer",
    [b"<html>", b"\xff", b"[1]", b"[" * 100_000, b'{"version": 1, "runs": [1], "host": 2}'],
    ids=["page", "bytes", "list", "nested", "other_types"],
)
def test_another_program_at_the_address(tmp_path: Path, answer: bytes) -> None:
    """Keep the other files where no daemon, or one of another version, answers."""
    with serve_answers(lambda _path: (200, "text/html", answer)) as port:
        config = settings(tmp_path, tmp_path / "run.sock", f'web: {{listen: "127.0.0.1:{port}"}}')
        files, _ = bundle(tmp_path, config)
    assert files["state.json"].startswith(("not available: ", '{\n "version": 1'))
    assert files["doctor.json"].startswith("[")
