"""Answer expressions over nvidia-ml-py, one a line, with JSON: the process that a test of the mock asks.

A process of its own, for a process cannot unload the library that it once loaded.
"""

import json
import sys
from typing import Any

import pynvml
from pynvml import *  # noqa: F403 - the names that the tests' expressions use


def gpu(index: int) -> Any:
    """Look up a GPU."""
    return pynvml.nvmlDeviceGetHandleByIndex(index)


for line in sys.stdin:
    try:
        reply = {"value": eval(line)}  # noqa: S307 - the test wrote the line
    except pynvml.NVMLError as error:
        reply = {"error": type(error).__name__.removeprefix("NVMLError_")}
    sys.stdout.write(json.dumps(reply) + "\n")
    sys.stdout.flush()
