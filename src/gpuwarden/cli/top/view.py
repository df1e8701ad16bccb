"""View of `gpuwarden top`: the order, the first line, and the help, as the user's keys choose them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from gpuwarden.cli.top.style import RANK
from gpuwarden.web.api.api_object import ApiObject

QUIT, DEFAULT_ORDER = "quit", "problem"
PAGE = 10  # lines
_ACTIONS: Mapping[bytes, str] = {
    b"q": QUIT,
    b"Q": QUIT,
    b"s": "sort",
    b"?": "help",
    b"h": "help",
    b"j": "down",
    b"k": "up",
    b"\x1b[A": "up",
    b"\x1bOA": "up",
    b"\x1b[B": "down",
    b"\x1bOB": "down",
    b" ": "page down",
    b"\x1b[6~": "page down",
    b"\x1b[5~": "page up",
    b"g": "home",
    b"\x1b[H": "home",
}
_SCROLL_LINES: Mapping[str, float] = {"up": -1, "down": 1, "page up": -PAGE, "page down": PAGE, "home": -inf}
_KEY_PATTERN = re.compile(rb"\x1b[\[O][0-9;]*[~A-Za-z]|.", re.DOTALL)

HELP = """\
q, Ctrl-C   quit
s           sort by: {orders}
Up, Down    scroll; also k and j, PgUp and PgDn, space; g goes to the top
?           show or hide this help

MEMORY      {in_use} in use by reporting runs, {reserved} allocated in addition, {free} free
HEADROOM    what the run with the least can still allocate
TEMP        of the chip, and where it throttles, in degrees Celsius
OWNER       users with memory on the GPU; of one user, the run, container or job
OOM IN      time to out of memory at the current growth
INPUT       part of step time spent waiting for input
PRESSURE    how close a run is to out of memory: none, warning, critical
\u25b2 \u2716         warning, critical: the same as in alerts"""


def sort_gpus(gpus: Sequence[ApiObject], order: str) -> list[ApiObject]:
    """Sort GPUs; those that are equal keep the daemon's order, by index."""
    return sorted(gpus, key=_GPU_KEYS[order])


def sort_runs(runs: Sequence[ApiObject], order: str) -> list[ApiObject]:
    """Sort runs by their tightest headroom or most memory; else they keep the daemon's order, running ones first."""
    key = _RUN_KEYS.get(order)
    return sorted(runs, key=key) if key else list(runs)


def _known(value: float | None) -> float:
    """Return a sort key in which an unknown value comes last."""
    return inf if value is None else value


_GPU_KEYS: Mapping[str, Callable[[ApiObject], float]] = {
    DEFAULT_ORDER: lambda gpu: RANK.get(gpu.text("condition"), 0),
    "number": lambda gpu: _known(gpu.number("index")),
    "memory": lambda gpu: -(gpu.number("memory_used_bytes") or 0.0),
    "headroom": lambda gpu: _known(gpu.number("headroom_bytes")),
    "temperature": lambda gpu: -(gpu.part("temperature_celsius").number("core") or 0.0),
    "utilization": lambda gpu: -(gpu.number("utilization_ratio") or 0.0),
}
ORDERS = tuple(_GPU_KEYS)
_RUN_KEYS: Mapping[str, Callable[[ApiObject], float]] = {
    "memory": lambda run: -sum(each.number("memory_in_use_bytes") or 0.0 for each in run.parts("devices")),
    "headroom": lambda run: min((_known(each.number("headroom_bytes")) for each in run.parts("devices")), default=inf),
}


@dataclass
class View:
    """View that the user has chosen. `first` is the first line, 0 to fit the most important rows on one screen."""

    order: str = DEFAULT_ORDER
    first: int = 0
    shows_help: bool = False

    def handle(self, typed: bytes) -> bool:
        """Handle the keys in what was typed; return False if one of them quits."""
        for key in _KEY_PATTERN.findall(typed):
            action = _ACTIONS.get(key)
            if action == QUIT:
                return False
            if action == "sort":
                self.order = ORDERS[(ORDERS.index(self.order) + 1) % len(ORDERS)]
            elif action == "help":
                self.shows_help = not self.shows_help
            elif action is not None:
                self.first = int(max(self.first + _SCROLL_LINES[action], 0))
        return True
