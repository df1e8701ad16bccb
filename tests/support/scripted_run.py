"""A real run: it reports through the client, writes that it did, and executes the commands it is given.

The commands come first as arguments after its name, then as lines of its input.
"""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from types import MappingProxyType
from typing import NoReturn

from gpuwarden.client.reporter import Reporter, join_run
from gpuwarden.protocol.messages import Hello

UUID = os.environ.get("RUN_ON")  # a GPU's
run: Reporter = join_run(None, Hello(sys.argv[1], "python", {"GPU:0": UUID} if UUID else {}))
held: list[bytearray] = []


def step() -> None:
    """Make a few steps, and report that the next is in progress."""
    run.state.stepping, run.state.phase = True, "train"
    for _ in range(20):
        run.add_executions([0.001], 1)
    run.report(time.monotonic())


def go_idle() -> None:
    """Report that no step is in progress."""
    run.state.stepping = False
    run.report(time.monotonic())


def fail() -> NoReturn:
    """Die of an uncaught exception."""
    raise ValueError("no such layer")


def allocate() -> NoReturn:
    """Allocate memory until it is killed."""
    while True:
        held.append(bytearray(b"x") * (8 << 20))


def fork() -> None:
    """Leave a worker that keeps all descriptors open, and die."""
    if os.fork() == 0:
        time.sleep(60)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)


def spin() -> NoReturn:
    """Use a CPU without end."""
    while True:
        pass


COMMANDS: MappingProxyType[str, Callable[[], object]] = MappingProxyType(
    {
        "step": step,
        "idle": go_idle,
        "return": lambda: None,
        "exit 3": lambda: sys.exit(3),
        "raise": fail,
        "_exit 0": lambda: os._exit(0),
        "abort": os.abort,
        "segfault": lambda: ctypes.string_at(0),
        "exec": lambda: os.execv("/bin/sh", ["sh", "-c", "read command; exit 5"]),  # noqa: S606 - what takes over
        "allocate": allocate,
        "fork": fork,
        "spin": spin,
        "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
        "sleep": lambda: time.sleep(600),
    }
)


def main() -> None:
    """Report, then follow the commands."""
    step()
    for command in sys.argv[2:]:
        COMMANDS[command]()
    for line in sys.stdin:
        COMMANDS[line.strip()]()
        if line.strip() == "return":
            return
        sys.stdout.write(f"{line.strip()} done\n")
        sys.stdout.flush()


sys.stdout.write("reported\n")
sys.stdout.flush()
main()
