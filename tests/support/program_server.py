"""Server of programs: it imports modules, then forks for each program: `python program_server.py MODULE ...`.

A line of standard input is an order, JSON with the `program`, its `folder` and its environment `env`. The program
writes to the files `output` and `errors` of the folder; its exit status is printed.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import signal
import sys
from typing import Any

PROGRAM_SECONDS = 300  # until a program that hangs is ended


def fork_for_orders() -> dict[str, Any] | None:
    """Fork for each order and wait for the child's end; return the order in the child, None at the end of the input."""
    for line in sys.stdin:
        order: dict[str, Any] = json.loads(line)
        child = os.fork()
        if child == 0:
            return order
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)  # noqa: T201 - read by the test
    return None


def set_up_process(order: dict[str, Any]) -> None:
    """Give this process what a program that is started has: time, folder, environment, arguments, files."""
    signal.alarm(PROGRAM_SECONDS)
    os.chdir(order["folder"])
    os.environ.update(order["env"])
    sys.argv = [order["program"]]
    sys.path[0] = order["folder"]
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for descriptor, name in ((1, "output"), (2, "errors")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), descriptor)


if __name__ == "__main__":
    for each in sys.argv[1:]:
        importlib.import_module(each)
    gc.freeze()
    order = fork_for_orders()
    if order:
        set_up_process(order)
        runpy.run_path(order["program"], run_name="__main__")
