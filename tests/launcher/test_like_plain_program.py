"""`gpuwarden run -- PROGRAM` compared with PROGRAM alone: what the program inherits, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from stand_in_server import serve_answers

from gpuwarden.web.api.api_paths import RUNS, STATE

# Scripts for sh. "$@" is empty, or `python -m gpuwarden run --`; what a script prints has to be the same.
PROPERTIES = {
    "exit status and death by a signal": '"$@" sh -c "exit 7"; echo $?; "$@" sh -c "kill -ABRT \\$\\$"; echo $?',
    "program that cannot be started": """
        "$@" ./none; echo $?; "$@" ./parent.py; echo $?; mkfifo -m 700 fifo; "$@" ./fifo; echo $?""",
    "script without #!": '"$@" ./no_shebang "two  words"; PATH=$PATH:.; "$@" no_shebang; echo $?',
    "SIGCHLD ignored": """
        "$PYTHON" ignoring.py CHLD "$@" grep SigIgn /proc/self/status /none; echo $?
        "$PYTHON" ignoring.py CHLD "$@" sleep 0.2; echo $?""",
    "SIGPIPE ignored by a shell": 'trap "" PIPE XFSZ; "$@" grep SigIgn /proc/self/status; echo $?',
    "SIGPIPE ignored by a shell's script": '"$@" grep SigIgn /proc/self/status; ./ignoring.sh "$@"; echo $?',
    "SIGPIPE ignored by systemd": '"$PYTHON" service.py "$@" grep SigIgn /proc/self/status; echo $?',
    "SIGPIPE ignored by a parent for itself": '"$PYTHON" parent.py "$@" grep SigIgn /proc/self/status; echo $?',
    "output that is not read to its end": '{ "$@" yes; echo $? >status; } | head -n 1; cat status',
    "SIGHUP ignored by nohup": 'nohup "$@" grep SigIgn /proc/self/status; echo $?',
    "SIGINT and SIGQUIT ignored in the background": '"$@" grep SigIgn /proc/self/status & wait $!; echo $?',
    "blocked signals": '"$PYTHON" blocking.py "$@" grep SigBlk /proc/self/status; echo $?',
    "SIGTERM": """
        "$@" "$PYTHON" counting.py >out & until grep -q ready out; do sleep 0.05; done
        kill -TERM $!; wait $!; echo $?; cat out""",
    "stop and continue": """
        "$PYTHON" own_group.py "$@" sh -c "echo ready; until [ -e go ]; do sleep 0.05; done; exit 3" >out &
        until grep -q ready out; do sleep 0.05; done
        kill -TSTP $!; until grep -q "^State:.T" /proc/$!/status; do sleep 0.05; done
        kill -CONT $!; touch go; wait $!; echo $?""",
    "pending alarm": '"$PYTHON" alarm.py "$@" "$PYTHON" -c "import signal as s; print(s.alarm(0) > 0)"; echo $?',
    "terminal, process group and session": """
        "$PYTHON" in_terminal.py sh -c '"$@" "$PYTHON" terminal.py $$; exit 0' sh "$@" """,
    "the terminal itself": """
        "$PYTHON" in_terminal.py sh -c '"$@" sh -c "cd /proc/self/fd; readlink 0 1 2 | uniq | wc -l"' sh "$@" """,
    "order of output": '"$@" sh -c "echo 1; echo 2 >&2; echo 3" 2>&1',
    "standard streams and descriptors": '"$@" "$PYTHON" files.py <alarm.py >out 2>err 3>three 5<parent.py; cat files',
    "closed standard streams": '"$@" "$PYTHON" files.py <&- >&- 2>&-; cat files',
    "arguments": """
        "$@" sh -c 'tr "\\0" "|" </proc/$$/cmdline' -- --name "two  words" "" "$(printf '\\377\\n.')" -h -- -
        echo $?""",
    "environment": """
        env -i A= "B= c" GPUWARDEN_SOCKET="$GPUWARDEN_SOCKET" GPUWARDEN_LISTEN="$GPUWARDEN_LISTEN" "$@" /usr/bin/env""",
    "working folder, umask, limits, priority": """
        mkdir "a b"; cd "a b"; umask 027; ulimit -n 100; ulimit -S -c 0; ulimit -S -s 4096
        echo 100 >/proc/self/oom_score_adj
        nice -n 3 "$@" sh -c "pwd -P; umask; nice; cd /proc/self; cat oom_score_adj limits; grep Cpus_allowed status"
        echo $?""",
}
SLOW = {  # each starts the launcher and its program; other properties, or test_run_command.py, cover the same code
    "exit status and death by a signal",
    "program that cannot be started",
    "script without #!",
    "SIGHUP ignored by nohup",
    "SIGPIPE ignored by a shell's script",
    "SIGPIPE ignored by systemd",
    "SIGPIPE ignored by a parent for itself",
    "SIGINT and SIGQUIT ignored in the background",
    "pending alarm",
    "the terminal itself",
    "order of output",
    "closed standard streams",
}

# Python ignores these, which the programs that it starts by exec would inherit.
RESET = "import os, signal, sys; [signal.signal(each, signal.SIG_DFL) for each in (signal.SIGPIPE, signal.SIGXFSZ)]"
BECOME = "os.execvp(sys.argv[1], sys.argv[1:])"
FILES = {
    "ignoring.py": f"{RESET}; signal.signal(signal.Signals['SIG' + sys.argv.pop(1)], signal.SIG_IGN); {BECOME}",
    "blocking.py": f"{RESET}; signal.pthread_sigmask(signal.SIG_BLOCK, [15, 12, 17, signal.SIGRTMIN + 3]); {BECOME}",
    "alarm.py": f"{RESET}; signal.alarm(600); {BECOME}",
    "own_group.py": f"{RESET}; os.setpgrp(); {BECOME}",
    "ignoring.sh": '#!/bin/sh\ntrap "" PIPE\n"$@" grep SigIgn /proc/self/status\nexit $?\n',
    "no_shebang": 'echo "$0" "$@"\n',
    "parent.py": "import subprocess, sys; sys.exit(subprocess.run(sys.argv[1:]).returncode)",
    "in_terminal.py": "import pty, sys; pty.spawn(sys.argv[1:])",
    "service.py": f"""
import os, sys
child = os.fork()
if not child:
    os.environ["SYSTEMD_EXEC_PID"] = str(os.getpid())
    {BECOME}
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
""",
    "counting.py": """
import signal, sys, time
seen = []
signal.signal(signal.SIGTERM, lambda *_: seen.append(1))
print("ready", flush=True)
while not seen:
    time.sleep(0.05)
time.sleep(0.3)
print(len(seen))
sys.exit(3)
""",
    "files.py": """
import fcntl, os
found = {}
for each in range(64):
    try:
        found[each] = os.readlink(f"/proc/self/fd/{each}"), fcntl.fcntl(each, fcntl.F_GETFL)
    except OSError:
        pass
with open("files", "w") as file:
    print("open:", *found.items(), sep="\\n", file=file)
""",
    "terminal.py": """
import os, sys
for number in range(50):
    os.write(1 + number % 2, b"%d of the output, in its order\\n" % number)
for each in range(3):
    print(os.isatty(each), os.get_terminal_size(each))
groups = {os.getpgrp(), os.getsid(0), os.tcgetpgrp(0), os.tcgetpgrp(os.open("/dev/tty", os.O_RDWR))}
print(groups == {int(sys.argv[1])})
""",
}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Run a stand-in for the machine's daemon, which knows at once how a run ended; yield its place as variables."""
    path = tmp_path_factory.mktemp("daemon") / "run.sock"
    runs: list[dict[str, Any]] = []

    def answer(path: str) -> tuple[int, str, bytes]:
        body = {STATE: {}, RUNS: {"live": [], "past": runs}}.get(path)
        return (404, "", b"") if body is None else (200, "application/json", json.dumps(body).encode())

    def accept(server: socket.socket) -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:  # it was shut down
                return
            with connection:
                pid, *_ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            runs.append({"pid": pid, "began_timestamp_seconds": time.time(), "outcome": "finished", "run_id": "1"})

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server, serve_answers(answer) as port:
        server.bind(str(path))
        server.listen()
        thread = threading.Thread(target=accept, args=(server,))
        thread.start()
        yield {"GPUWARDEN_SOCKET": str(path), "GPUWARDEN_LISTEN": f"127.0.0.1:{port}"}
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in PROPERTIES]
)
def test_property(name: str, daemon: dict[str, str], tmp_path: Path) -> None:
    """The program has the property as it has it alone."""
    alone = observe(PROPERTIES[name], [], daemon, tmp_path / "alone")
    assert alone
    options = ["--no-stderr"] if name == "the terminal itself" else []
    command = [sys.executable, "-m", "gpuwarden", "run", *options, "--"]
    assert observe(PROPERTIES[name], command, daemon, tmp_path / "run") == alone


def observe(script: str, command: list[str], daemon: dict[str, str], folder: Path) -> list[str]:
    """Return the lines that a script prints, without what `gpuwarden run` adds by docs/use/run.md."""
    folder.mkdir()
    for name, text in FILES.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o600 if name.endswith(".py") else 0o700)
    with subprocess.Popen(
        ["sh", "-c", script, "sh", *command],
        env=os.environ | daemon | {"PYTHON": sys.executable},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=folder,
        start_new_session=True,
    ) as shell:
        try:
            printed, _ = shell.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(shell.pid, signal.SIGKILL)
            raise
    text = printed.replace(bytes(folder), b"FOLDER").decode(errors="backslashreplace")
    added = ("PYTHONPATH=", "GPUWARDEN_")
    lines = text.partition("gpuwarden run, started ")[0].splitlines()
    return [each for each in lines if each and "socket:" not in each and not each.startswith(added)]


def test_connection_that_is_closed_at_once(tmp_path: Path) -> None:
    """A daemon that closes the connection of the program, before it starts, does not end it by SIGPIPE."""
    script = """if True:
        import os
        from contextlib import suppress
        from gpuwarden.launcher.program import run_program
        reader, writer = os.pipe()
        os.close(reader)
        def prepare():
            with suppress(BrokenPipeError):
                os.write(writer, b"hello")
        print(run_program(["true"], {"PATH": os.defpath}, prepare=prepare).status)
    """
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout == "0\n"


def test_private_daemon_ends_where_sigterm_is_blocked(tmp_path: Path) -> None:
    """Stop a program in the background by SIGTERM at once, not by SIGKILL after seconds."""
    script = """if True:
        import os, signal
        from pathlib import Path
        from gpuwarden.launcher.background import running
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        with running(["sleep", "60"], {"PATH": os.defpath}, Path("log")) as process:
            pass
        print(process.returncode)
    """
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout == f"{-signal.SIGTERM}\n"
