"""End of standard error on the card, while the program writes as ever."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from pseudo_terminal import terminal

LAUNCHER = """
import os, subprocess, sys
from gpuwarden.launcher.stderr_tail import StderrTail
tail = StderrTail()
subprocess.run(sys.argv[2:], preexec_fn=tail.attach)
kept = tail.read()
os.write(1, b"end\\n")
open(sys.argv[1], "wb").write(kept)
"""
ALTERNATING = "import os; [os.write(1 + n % 2, b'line %d\\n' % n) for n in range(2000)]"


def pass_on(folder: Path, *command: str) -> tuple[bytes, bytes]:
    """Return what a program writes to both of its streams, as one pipe, and what is kept of it."""
    done = subprocess.run(
        [sys.executable, "-c", LAUNCHER, str(folder / "kept"), *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=60,
        check=True,
    )
    return done.stdout, (folder / "kept").read_bytes()


def test_order_of_one_pipe(tmp_path: Path) -> None:
    """Both streams as one pipe keep their order, and what comes after the program is after it."""
    lines = b"".join(b"line %d\n" % number for number in range(2000))
    assert pass_on(tmp_path, sys.executable, "-c", ALTERNATING) == (lines + b"end\n", lines)


@pytest.mark.parametrize("size", [0, 1, 65_535, 65_536, 65_537, 300_000])
def test_bound(tmp_path: Path, size: int) -> None:
    """All of it is passed on, and the last 64 KiB are kept."""
    data = (b"0123456789\n" * 30_000)[:size]
    (tmp_path / "data").write_bytes(data)
    passed, kept = pass_on(tmp_path, "cat", str(tmp_path / "data"))
    assert passed == data + b"end\n"
    assert kept == data[-65_536:]


def test_process_left_behind(tmp_path: Path) -> None:
    """It can write after the program and what kept its output have ended."""
    go = tmp_path / "go"
    os.mkfifo(go)
    command = ["sh", "-c", f"(read line <{go}; echo late) & exit 3"]
    with subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(tmp_path / "kept"), *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as launched:
        assert launched.stdout is not None
        assert launched.stdout.readline() == b"end\n"
        assert launched.wait(60) == 0
        go.write_text("now\n")
        assert launched.stdout.read() == b"late\n"


SIZES = """
import os, signal, time
seen = []
signal.signal(signal.SIGWINCH, lambda *_: seen.append(os.get_terminal_size(2).columns))
print("columns", os.get_terminal_size(2).columns, flush=True)
while seen[-1:] != [60]:
    time.sleep(0.02)
print("then", seen[-1], flush=True)
os.write(2, b"out of paper\\n")
os._exit(5)
"""


def test_terminal(tmp_path: Path) -> None:
    """A terminal's new size is the program's when the signal arrives; its last words are on the card."""
    env = {"GPUWARDEN_SOCKET": str(tmp_path / "none.sock"), "TMPDIR": str(tmp_path)}
    card = tmp_path / "card.json"
    with terminal("run", "--card", str(card), "--", sys.executable, "-c", SIZES, env=env) as screen:
        screen.wait_until(lambda text: "columns 80" in text, "the program")
        screen.resize(60, 24)
        screen.wait_until(lambda text: "then 60" in text, "the size")
        assert screen.wait() == 5
    assert json.loads(card.read_text())["stderr"].splitlines()[-1] == "out of paper"
