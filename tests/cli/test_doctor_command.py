"""`gpuwarden doctor` as users see it: in a terminal of 80 columns, as JSON, with and without a driver."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
from commands import COMMAND, run_command
from pseudo_terminal import Terminal
from rich.console import Console

from gpuwarden.cli.commands.doctor_command import find_python, render_report
from gpuwarden.doctor.model import SUBJECTS, CheckResult
from gpuwarden.doctor.runner.checks import CHECKS
from mock_nvml import MockNvml

RESULTS = [
    CheckResult("machine.gpu", "pass", "2 NVIDIA GPUs on the PCI bus"),
    CheckResult("machine.wsl", "skip", "not WSL2"),
    CheckResult("driver.module", "pass", "kernel module 580.95.05"),
    CheckResult(
        "driver.versions",
        "fail",
        "The loaded kernel module is 580.95.05, but libnvidia-ml is 580.178.04.",
        "The driver was updated under the old module: no program can use a GPU until then.",
        "sudo reboot",
    ),
    CheckResult("gpu.ecc", "skip", "no GPU answers"),
    CheckResult("gpu.mig", "skip", "no GPU answers"),
    CheckResult("input.cpus", "warn", "Few.", "They wait.", "srun --cpus-per-task=8"),
]


def rendered(results: list[CheckResult], width: int = 80) -> str:
    """Return the report as plain text."""
    console = Console(file=StringIO(), width=width, soft_wrap=True)
    for line in render_report(results, "gpuwarden doctor, python /env/bin/python", width):
        console.print(line)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def doctor(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command."""
    return run_command("doctor", *arguments, env=env)


def test_report() -> None:
    """Passes take a line, problems say why and how to mend them, and the worst comes last once more."""
    assert (
        rendered(RESULTS)
        == """\
gpuwarden doctor, python /env/bin/python

Machine
  PASS  gpu  2 NVIDIA GPUs on the PCI bus
  SKIP  wsl: not WSL2

Driver
  PASS  module  kernel module 580.95.05
  FAIL  versions: The loaded kernel module is 580.95.05, but libnvidia-ml is
        580.178.04.
        The driver was updated under the old module: no program can use a GPU
        until then.
        Fix: sudo reboot

GPUs
  SKIP  ecc, mig: no GPU answers

Input
  WARN  cpus: Few.
        They wait.
        Fix: srun --cpus-per-task=8

1 failed, 1 with warnings, 2 passed, 3 skipped
Do first: sudo reboot (driver.versions)
"""
    )


def test_report_without_a_problem() -> None:
    """Nothing is left to do."""
    assert rendered(RESULTS[:3]).splitlines()[-1] == "2 passed, 1 skipped"


def test_report_on_a_narrow_terminal() -> None:
    """No line is longer, as long as no word is."""
    assert max(map(len, rendered(RESULTS, 50).splitlines())) <= 50


def test_untrusted_text_is_made_harmless() -> None:
    """Names of processes and variables come from other people's programs."""
    evil = CheckResult("memory.gpu", "warn", "held by \x1b[2Jx [bold]", "why", "fix")
    assert "\x1b" not in rendered([evil])
    assert "[bold]" in rendered([evil])


def test_every_subject_has_a_title() -> None:
    """The report and the reference group the checks by subject."""
    assert {name.partition(".")[0] for row in CHECKS for name in row.names} <= SUBJECTS.keys()


def test_in_a_terminal(mock_nvml: MockNvml) -> None:
    """In 80 columns no line is cut or wrapped by the terminal, and the status has its color."""
    mock_nvml.lose(1)
    shown = Terminal("doctor", columns=80, lines=200, env=mock_nvml.env(gpus=2))
    lines = [line.rstrip() for line in shown.wait_until(lambda text: "Do first:" in text, "the report is complete")]
    assert shown.wait() == 1
    shown.close()
    assert lines[0].startswith("gpuwarden doctor")
    assert "  FAIL  answers: GPU 1: does not answer (GPU is lost)." in lines
    assert b"\x1b[1;31m  FAIL" in shown.written


def test_json(mock_nvml: MockNvml) -> None:
    """All results by name, and the exit status says whether one failed; without a driver too."""
    for env in (mock_nvml.env(gpus=1), {}):
        done = doctor("--json", env=env)
        document = json.loads(done.stdout)
        assert {"version", "python", "checks"} == document.keys()
        names = [each["name"] for each in document["checks"]]
        assert len(names) == len(set(names))
        assert set(names) <= {name for row in CHECKS for name in row.names}
        assert done.returncode == any(each["status"] == "fail" for each in document["checks"])
        assert done.stderr == ""


def test_takes_little_time(mock_nvml: MockNvml) -> None:
    """A person waits for it: three seconds at most, here counted as CPU time, as the machine may be busy."""
    before = os.times()
    subprocess.run(
        [*COMMAND, "doctor"], stdout=subprocess.DEVNULL, env={**os.environ, **mock_nvml.env(gpus=8)}, check=False
    )
    after = os.times()
    assert after.children_user + after.children_system - before.children_user - before.children_system < 3


def test_plain_text_in_a_pipe() -> None:
    """No escape code, and the exit status of a machine without a GPU."""
    done = doctor("--read", "/etc/hostname")
    assert "\x1b" not in done.stdout
    assert re.search(r"\d+ passed", done.stdout)
    assert "from /etc/hostname" in done.stdout
    assert done.returncode == ("FAIL" in done.stdout)


def test_python_of_an_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folder or its interpreter; the link of a virtual environment is not followed."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").symlink_to(sys.executable)
    python = tmp_path / "bin/python"
    assert find_python(str(tmp_path), {}) == find_python(str(python), {}) == python
    assert find_python(None, {"VIRTUAL_ENV": str(tmp_path)}) == python
    assert find_python(None, {"CONDA_PREFIX": str(tmp_path)}) == python
    assert find_python(None, {"VIRTUAL_ENV": str(tmp_path / "gone")}) == Path(sys.executable)
    assert find_python(str(tmp_path / "bin"), {}) is None
    monkeypatch.chdir(tmp_path / "bin")
    assert find_python("./python", {}) == python
    done = doctor("--python", str(tmp_path / "nothing"))
    assert (done.returncode, done.stdout) == (2, "")
    assert "is neither a Python nor an environment" in done.stderr


@pytest.mark.parametrize("width", [80, 120])
def test_lines_of_a_real_report(width: int) -> None:
    """Only a path or a command that is one word may be longer."""
    done = doctor(env={"COLUMNS": str(width)})
    assert [line for line in done.stdout.splitlines() if len(line) > width and " " in line.strip()] == []
