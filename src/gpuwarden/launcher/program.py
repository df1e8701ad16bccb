"""Program that is run unchanged: its environment and hello to the daemon, its signals and exit status passed through.

It has the same terminal and process group. Any program has a run by its hello, with its GPUs and its end.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpuwarden.cli.common.terminal import complain
from gpuwarden.launcher.stderr_tail import StderrTail
from gpuwarden.protocol.codec import encode
from gpuwarden.protocol.messages import Hello
from gpuwarden.protocol.run_folder import FOLDER_VARIABLE, NAME_VARIABLE, RUN_VARIABLE
from gpuwarden.protocol.socket_trust import find_distrust, read_credentials
from gpuwarden.protocol.validators import clip

# Signals that are passed on. Those that a terminal sends to all processes of its foreground group (Ctrl-C, Ctrl-\, its
# end, its size) have reached the program too; the kernel is their sender.
_PASSED = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGALRM,
    signal.SIGWINCH,
    signal.SIGTSTP,
    signal.SIGCONT,
)
_TO_END = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT}
_OF_JOB_CONTROL = (signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)
_HEAD_BYTES = 256  # of a file, by which the kernel recognizes a program (BINPRM_BUF_SIZE of linux/binfmts.h)
_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
_INHERITED_SIGNALS = (signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ)  # that this process has changed for itself
_FROM_PROCESS = (0, -1, -6)  # si_code of kill, sigqueue and tgkill (include/uapi/asm-generic/siginfo.h)
# The first folder of PYTHONPATH: Python runs the sitecustomize.py in it, which waits for a framework to be imported.
_SITE = Path(__file__).parents[1] / "client" / "boot" / "site"
_SEND_SECONDS = 1.0
_FIRST_FREE_DESCRIPTOR = 3  # a closed standard stream of the program must not become the connection


@dataclass(frozen=True, slots=True)
class ProgramEnd:
    """End of a program: `status` is that of wait(2), `began` is Unix time, `seconds` are by a steady clock."""

    pid: int
    status: int
    began: float
    seconds: float

    @property
    def signal(self) -> int | None:
        """Signal that ended it; real-time signals have no name in Python's `signal.Signals`."""
        return os.WTERMSIG(self.status) if os.WIFSIGNALED(self.status) else None

    @property
    def exit_code(self) -> int | None:
        """Exit status that it ended with itself."""
        return os.WEXITSTATUS(self.status) if os.WIFEXITED(self.status) else None


def run_program(
    command: Sequence[str],
    environment: Mapping[str, str],
    ignored: Collection[int] = (),
    prepare: Callable[[], object] = lambda: None,
    tail: StderrTail | None = None,
) -> ProgramEnd:
    """Run a program until it ends; call it in the main thread, before any other thread exists.

    The program ignores SIGCHLD, SIGPIPE and SIGXFSZ if they are in `ignored`; other signals as this process does. It
    gets this process's pending timers. `prepare` is called in the new process, before the program. `tail` becomes its
    standard error.

    Blocks; what the program leaves behind is not waited for. Signals that would be passed on stay blocked, so that none
    ends this process before it has reported: see `should_hurry`. Raises OSError if the program cannot be started.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*_PASSED, signal.SIGCHLD})
    timers = {timer: signal.setitimer(timer, 0) for timer in _TIMERS}  # execve(2) keeps them, fork(2) does not

    def begin() -> None:
        prepare()
        if tail is not None:
            tail.attach()
        _set_timers(timers)
        for number in _INHERITED_SIGNALS:
            signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    began, started = time.time(), time.monotonic()
    try:
        process = subprocess.Popen(
            _add_shell(command, environment),
            env=environment,
            close_fds=False,  # a shell's `3>log` reaches the program
            restore_signals=False,  # `begin` does, after `prepare`, which a closed connection must not end by SIGPIPE
            preexec_fn=begin,  # noqa: PLW1509 - this process has one thread
        )
    except BaseException:
        _set_timers(timers)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        raise
    status = _wait(process.pid, tail)
    process.returncode = os.waitstatus_to_exitcode(status)  # has been waited for
    return ProgramEnd(process.pid, status, began, time.monotonic() - started)


def should_hurry() -> bool:
    """Return whether a signal to end has arrived after the program ended, such as a second Ctrl-C."""
    return not _TO_END.isdisjoint(signal.sigpending())


def end_like(end: ProgramEnd) -> int:
    """Return a program's exit status; after a signal end this process by the same one, without a core."""
    if end.signal is None:
        return end.exit_code or 0
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the program's core is the one to look at
    if end.signal != signal.SIGKILL:
        signal.signal(end.signal, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {end.signal})
    os.kill(os.getpid(), end.signal)
    return 128 + end.signal  # as shells say it, for a signal that does not end this process


def _set_timers(timers: Mapping[int, tuple[float, float]]) -> None:
    for timer, (seconds, interval) in timers.items():
        signal.setitimer(timer, seconds, interval)


def _add_shell(command: Sequence[str], environment: Mapping[str, str]) -> Sequence[str]:
    """Return the command, with /bin/sh before a script that has no `#!`: shells and execvp(3) run it so."""
    path = shutil.which(command[0], path=environment.get("PATH", os.defpath))
    with contextlib.suppress(OSError):  # it cannot be read
        if path is not None and Path(path).is_file():  # to open a FIFO would wait for its writer
            with Path(path).open("rb") as file:
                head = file.read(_HEAD_BYTES)
            if not head.startswith(b"#!") and b"\0" not in head:  # binary formats have a zero byte in their head
                return ["/bin/sh", path, *command[1:]]
    return command


def _wait(pid: int, tail: StderrTail | None) -> int:
    """Pass signals on until the program ends; return its status."""
    while True:
        changed, status = os.waitpid(pid, os.WNOHANG | os.WUNTRACED)
        if changed and os.WIFSTOPPED(status):
            # A program that stops itself may do so by SIGSTOP; the same signal of a scheduler is for the program alone.
            if os.WSTOPSIG(status) in _OF_JOB_CONTROL or _is_in_foreground():
                os.kill(os.getpid(), signal.SIGSTOP)  # so that the shell sees the job stop, and can continue it
        elif changed:
            return status
        info = signal.sigwaitinfo({*_PASSED, signal.SIGCHLD})
        is_news = info.si_code in _FROM_PROCESS and info.si_pid != pid
        if info.si_signo == signal.SIGWINCH and tail is not None:
            tail.resize()
            is_news = True  # the program may have looked at the size before
        if info.si_signo != signal.SIGCHLD and is_news:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, info.si_signo)


def _is_in_foreground() -> bool:
    """Return whether this process's group has its terminal, so that a shell waits for it."""
    with contextlib.suppress(OSError):  # there is no terminal
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
        try:
            return os.tcgetpgrp(terminal) == os.getpgrp()
        finally:
            os.close(terminal)
    return False


def make_environment(folder: Path, runs: Path | None, name: str | None, *, census: bool) -> dict[str, str]:
    """Return a program's environment; its processes leave logs in `folder`, and report to the socket `runs` as `name`.

    With `census` they look for what keeps their tensors, when memory leaks or runs short.
    """
    paths = [str(_SITE), *filter(None, [os.environ.get("PYTHONPATH")])]
    changed = {
        **inherited_environment(),
        "PYTHONPATH": os.pathsep.join(paths),
        RUN_VARIABLE: "1",
        FOLDER_VARIABLE: str(folder),
        "GPUWARDEN_SUMMARY": "0",  # the card has it
    }
    if runs is not None:
        changed["GPUWARDEN_SOCKET"] = str(runs)
    if name is not None:
        changed[NAME_VARIABLE] = name
    if census:
        changed["GPUWARDEN_CENSUS"] = "1"
    return changed


def inherited_environment() -> dict[str, str]:
    """Return this process's environment, without the LC_CTYPE that Python adds where there is no locale (PEP 538)."""
    inherited = dict(os.environ)
    with contextlib.suppress(OSError):  # no /proc
        if b"\0LC_CTYPE=" not in b"\0" + Path("/proc/self/environ").read_bytes():
            inherited.pop("LC_CTYPE", None)
    return inherited


def introduce_program(path: Path, name: str, framework: str) -> None:
    """Say hello for the process that calls this, just before it becomes the program; raises nothing.

    A run is its process: reports of the program itself, on a connection of their own, are of the same run.
    """
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(_SEND_SECONDS)
        connection.connect(str(path))
        if distrust := find_distrust(path, read_credentials(connection)[1]):
            complain(f"gpuwarden run: the daemon at {path} is not trusted and gets no report: {distrust}")
        else:
            connection.send(encode(Hello(clip(name), clip(framework), {})))
            fcntl.fcntl(connection, fcntl.F_DUPFD, _FIRST_FREE_DESCRIPTOR)  # the copy stays open in the program
