"""SIGHUP to a daemon: reloads the configuration, except where its terminal was closed."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from services import Daemon, end_processes, fetch, wait_until


def start(folder: Path, preparation: str = "", interpreter: Sequence[str] = ()) -> Daemon:
    """Start a daemon whose process does something first; only one with an `interpreter` of its own loads modules."""
    script = folder.with_suffix(".py")
    script.write_text(f"import os, signal, sys\n{preparation}\nfrom gpuwarden.cli.main import main\nsys.exit(main())")
    return Daemon(folder, "--source", "simulated", program=(*interpreter, str(script)))


def polled_at(daemon: Daemon) -> float:
    """Return the time of the last poll."""
    return daemon.samples().value("gpuwarden_poll_timestamp_seconds") or 0.0


RELOADED = "configuration reloaded applied="


def logged(daemon: Daemon, count: int) -> bool:
    """Return whether a reload was logged so many times."""
    return daemon.output().count(RELOADED) == count


def test_reload_ends_nothing(tmp_path: Path) -> None:
    """Runs, polls and pages continue over a reload."""
    daemon = start(tmp_path / "box")
    with end_processes(daemon):
        for count in (1, 2):
            daemon.popen.send_signal(signal.SIGHUP)
            wait_until(partial(logged, daemon, count), "the log line")
        now = time.time()
        wait_until(lambda: polled_at(daemon) > now, "the next poll")
        assert daemon.kill(signal.SIGTERM) == 0
    assert not daemon.socket.exists()


def test_is_ignored_from_the_first_line_of_serve(tmp_path: Path) -> None:
    """SIGHUP while the daemon's modules load, as a log rotation just after a restart sends it."""
    sends = """
class Sends:
    def find_spec(self, name, path=None, target=None):
        if name == "gpuwarden.cli.commands.serve_command":
            os.kill(os.getpid(), signal.SIGHUP)

sys.meta_path.insert(0, Sends())
"""
    daemon = start(tmp_path / "box", f"os.setsid()\n{sends}", [sys.executable])
    with end_processes(daemon):
        assert daemon.output().count("SIGHUP ignored, the daemon is starting") == 1


def test_burst_is_handled_signal_by_signal(tmp_path: Path) -> None:
    """A SIGHUP for each log line of the one before, as in a burst while the log is slow: none is nested."""
    sends = """
import logging

class Sends(logging.Handler):
    left = 500

    def emit(self, record):
        if record.getMessage().startswith("configuration reloaded") and self.left:
            self.left -= 1
            os.kill(os.getpid(), signal.SIGHUP)

logging.getLogger("gpuwarden").addHandler(Sends())
"""
    daemon = start(tmp_path / "box", sends)
    with end_processes(daemon):
        daemon.popen.send_signal(signal.SIGHUP)
        wait_until(lambda: logged(daemon, 501), "a log line for each signal")
        assert daemon.kill(signal.SIGTERM) == 0
        assert "Traceback" not in daemon.output()


def start_in_terminal(folder: Path, preparation: str = "") -> tuple[Daemon, int]:
    """Start a daemon in a terminal of its own; return it and the end that closes the terminal."""
    ours, theirs = os.openpty()
    opened = f"terminal = os.open({os.ttyname(theirs)!r}, os.O_RDWR)  # tty_ioctl(4): now it controls"
    daemon = start(folder, f"{opened}\n{preparation}")
    os.close(theirs)
    return daemon, ours


def test_closed_terminal_ends_it_in_order(tmp_path: Path) -> None:
    """A daemon in a terminal ends with the terminal, with status 0 and without its sockets."""
    daemon, terminal = start_in_terminal(tmp_path / "box")
    with end_processes(daemon):
        daemon.popen.send_signal(signal.SIGHUP)  # by hand, as the terminal is there
        wait_until(lambda: RELOADED in daemon.output(), "the log line")
        os.close(terminal)
        assert daemon.popen.wait(60) == 0, daemon.output()
        assert "Traceback" not in daemon.output()
    assert not daemon.socket.exists()


def test_nohup_is_respected(tmp_path: Path) -> None:
    """Under nohup a closed terminal changes nothing."""
    daemon, terminal = start_in_terminal(tmp_path / "box", "signal.signal(signal.SIGHUP, signal.SIG_IGN)")
    with end_processes(daemon):
        os.close(terminal)
        now = time.time()
        wait_until(lambda: polled_at(daemon) > now, "the next poll")
        assert "SIGHUP" not in daemon.output()
        assert fetch(f"{daemon.url}/-/ready")
