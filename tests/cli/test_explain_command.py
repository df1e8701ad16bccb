"""`gpuwarden explain` as users see it: a file, a pipe, and inputs without an error."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from commands import run_command

from gpuwarden.cli.commands import explain_command
from gpuwarden.cli.main import main
from gpuwarden.explain.log_lines import LogReader

LOG = b"""Epoch 1/3
[rank1]: RuntimeError: CUDA error: no kernel image is available for execution on the device
[rank0]: torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:275, remote process exited
"""


def explain(*arguments: str, text: bytes = b"") -> subprocess.CompletedProcess[str]:
    """Run the command with a text on its standard input."""
    return run_command("explain", *arguments, env={"COLUMNS": "80"}, text=text)


def test_pipe_and_file_give_the_same(tmp_path: Path) -> None:
    """A log is read from a pipe, from `-`, or from a file; every line fits 80 columns."""
    file = tmp_path / "train.log"
    file.write_bytes(LOG)
    shown = {explain(*arguments, text=LOG).stdout for arguments in ((), ("-",), (str(file),))}
    (text,) = shown
    assert "(unsupported_compute_capability)" in text
    assert "Followed from it\n  line 3, rank0: collective operation" in text
    assert max(map(len, text.splitlines())) <= 80


def test_evidence_is_of_this_machine() -> None:
    """The checks run on this machine; with --no-checks none does."""
    with_checks = json.loads(explain("--json", text=LOG).stdout)
    without = json.loads(explain("--json", "--no-checks", text=LOG).stdout)
    assert with_checks["problem"] == without["problem"] == "unsupported_compute_capability"
    assert not any(cause["checks"] for cause in without["causes"])


@pytest.mark.parametrize("text", [b"", b"Epoch 1/3\nloss 0.3\n", bytes(range(256)) * 400, b"\0" * 5000])
def test_text_without_a_known_error_says_so(text: bytes) -> None:
    """Nothing known is no crash: it says what to send, with exit status 1."""
    done = explain("--no-checks", text=text)
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.startswith("No known error in the text.\n")
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert json.loads(explain("--no-checks", "--json", text=text).stdout) == {"problem": None, "lines_left_out": 0}


def test_lines_that_were_left_out_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A text whose search takes too long has an answer all the same, which says what was not searched."""
    monkeypatch.setattr(explain_command, "LogReader", partial(LogReader, seconds=-1.0))
    monkeypatch.setattr(logging, "disable", lambda _level: None)  # it would last for the other tests
    file = tmp_path / "train.log"
    file.write_bytes(LOG.replace(b"Epoch", b"RuntimeError: CUDA error: out of memory\n"))
    main(["explain", "--no-checks", str(file)])
    assert "(device_out_of_memory)" in (shown := capsys.readouterr().out)
    assert "\nNot searched: 3 lines from line 2 on.\n" in shown
    assert main(["explain", "--no-checks", "--json", str(file)]) == 0
    assert json.loads(capsys.readouterr().out)["lines_left_out"] == 3


def test_missing_file_is_named(tmp_path: Path) -> None:
    """A path that does not exist is no run."""
    done = explain(str(tmp_path / "nosuch.log"))
    assert (done.returncode, done.stdout) == (1, "")
    assert "nosuch.log: No such file" in done.stderr
    assert "Is a directory" in explain(str(tmp_path)).stderr


def test_named_pipe_is_a_file(tmp_path: Path) -> None:
    """A shell's <(command) is one."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen(["sh", "-c", f"echo MemoryError > '{pipe}'"]):
        assert "(host_out_of_memory)" in explain("--no-checks", str(pipe)).stdout


def test_reader_that_closes_the_pipe() -> None:
    """`| head -1` is no error."""
    program = f"{sys.executable} -m gpuwarden explain --no-checks | head -1"
    done = subprocess.run(["sh", "-c", program], input=LOG, capture_output=True, timeout=120, check=False)
    assert done.stdout.startswith(b"No code for this GPU")
    assert done.stderr == b""
