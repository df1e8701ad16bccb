"""Server of gpuwarden's commands and of scripts: it has imported gpuwarden, and forks a process for each.

A process of its own takes 0.2 to 0.5 s of CPU time, mostly for imports; a forked one takes 0.02 to 0.08 s. A line of
standard input is an order in JSON, a line of standard output its answer: `start`, the arguments of `gpuwarden` or of a
`script`, is answered by a pid, `poll` by the exit status, null while the process runs.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import json
import os
import runpy
import sys
import termios
import time
from pathlib import Path
from typing import Any

# isort: split  the daemon comes first: it loads asyncio without ssl
import gpuwarden.cli.commands.serve_command  # noqa: F401
from gpuwarden.cli.common.entry_points import load_function
from gpuwarden.cli.main import main
from gpuwarden.cli.parser import COMMANDS

DRIVER = "libnvidia-ml.so.1"

statuses: list[int] = []  # exit status of the command or script, once it has one


def skip_teardown() -> None:
    """End this forked process at once: to free its objects would copy the memory that it shares with the server."""
    if statuses:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(statuses[0])


def open_files(names: list[str]) -> list[int]:
    """Open the files of standard input, output and errors."""
    output = os.O_RDWR | os.O_CREAT | os.O_APPEND
    return [
        os.open(name, os.O_NOCTTY | mode, 0o600)
        for name, mode in zip(names, (os.O_RDONLY, output, output), strict=True)
    ]


def set_up_process(order: dict[str, Any], files: list[int]) -> None:
    """Give this process a session, the environment and folder of the order, and its files; a terminal is its own."""
    os.setsid()
    os.environ.clear()
    os.environ.update(order["env"])
    time.tzset()
    os.chdir(order["folder"])
    for number, opened in enumerate(files):
        os.dup2(opened, number)
    if os.isatty(0):
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    encoding = os.environ.get("PYTHONIOENCODING")
    sys.stdin = os.fdopen(0, encoding=encoding, closefd=False)
    sys.stdout = os.fdopen(1, "w", encoding=encoding, closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, encoding, "backslashreplace", closefd=False)
    # The linker read LD_LIBRARY_PATH when this process began; a library that is loaded is found by its name.
    for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":"):
        if Path(folder, DRIVER).exists():
            ctypes.CDLL(str(Path(folder, DRIVER)))
            break


def serve() -> str | None:
    """Carry out the orders until the end of the input; return in a forked process, with the script that it runs."""
    for line in os.fdopen(os.dup(0)):
        order = json.loads(line)
        if "poll" in order:
            pid, status = os.waitpid(order["poll"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            files = open_files(order["files"])  # before the answer: the other process may then close its end of a pipe
            answer = os.fork()
            if answer == 0:
                set_up_process(order, files)
                script: str | None = order["script"]
                sys.argv = [script or "gpuwarden", *order["start"]]
                return script
            for each in files:
                os.close(each)
        print(json.dumps(answer), flush=True)  # noqa: T201 - read by the test
    os._exit(0)


if __name__ == "__main__":
    for command in COMMANDS:
        load_function(command.function)  # a command is imported when it is called
    atexit.register(skip_teardown)  # what the command registers is called before
    gc.freeze()
    script = serve()
    try:
        if script:
            runpy.run_path(script, run_name="__main__")
        statuses.append(0 if script else main())
    except SystemExit as end:  # argparse's, after --help and wrong arguments
        statuses.append(int(end.code or 0))
