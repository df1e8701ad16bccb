"""Signals that this process ignored at its start, as a shell's `trap ''` sets them, and that it no longer ignores."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from gpuwarden.host.procfs import read_ignored_signals

# Python ignores these at its start, before any code of ours, so only the parent shows what was inherited.
_HIDDEN_BY_PYTHON = {signal.SIGPIPE, signal.SIGXFSZ}
# Programs that pass on what they ignore. Others, such as Python or Node, ignore SIGPIPE for themselves alone.
_SHELLS = {"sh", "ash", "bash", "busybox", "dash", "ksh", "ksh93", "mksh", "zsh"}

_reset: set[signal.Signals] = set()


def enable_child_signal() -> None:
    """Let this process wait for its children: while SIGCHLD is ignored, the kernel discards their exit status."""
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _reset.add(signal.SIGCHLD)


def find_ignored_signals() -> set[signal.Signals]:
    """Return those of SIGCHLD, SIGPIPE and SIGXFSZ that this process ignored at its start, as far as known.

    Call it early: it reads the parent, which may end.
    """
    parent = os.getppid()
    # systemd sets the variable for the process that it starts; an orphan, which is its child too, has another value.
    is_service = os.environ.get("SYSTEMD_EXEC_PID") == str(os.getpid())
    if is_service or _find_names(parent) & _SHELLS:
        return _reset | (_HIDDEN_BY_PYTHON & read_ignored_signals(parent))
    return set(_reset)


def _find_names(pid: int) -> set[str]:
    """Return the names of a process and of its program: while a shell runs a script, the first is the script's."""
    names = set()
    with contextlib.suppress(OSError):  # it has ended
        names.add(Path(f"/proc/{pid}/comm").read_text(errors="replace").strip())
    with contextlib.suppress(OSError):  # or is another user's
        names.add(Path(f"/proc/{pid}/exe").readlink().name)
    return names
