"""A week of a fleet of boxes of eight GPUs as a Prometheus' data: `python bench/fleet_week.py FOLDER` makes it.

The last day of a box is played (box_week.py), the rules evaluated over it as often as shipped, every five seconds and
each minute what is recorded for dashboards, and a fleet made of it by cloned_blocks.py, each box with GPUs, users and
runs of its own. Days before are the same one again, moved back in time and with other runs: where a series' value is a
time, it is days late there.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from itertools import chain
from pathlib import Path

import box_week  # before the two beside it, which it finds
from box_week import BUSY, DAY, STEP, TROUBLED

import backfill  # isort: skip
from history import BEGIN, alerting  # isort: skip
from cloned_blocks import Copies, write_block

from gpuwarden.alerts.rules import Choices

DAYS, BOXES, IN_TROUBLE, PLAYED = 7, 100, 5, 1
COMPACTING_NOTHING = ("--storage.tsdb.max-block-duration=1d",)  # compacting would write each copy's chunks out
_RUN = re.compile(r"(\d{7})-(\d+)")
_USERS = frozenset({"ada", "grace", "hedy", "joan", "karen"})


def of_box(number: int, day: int, symbol: str) -> str:
    """Return a label's value as it is on the box of that number; on another `day` there are other runs."""
    if symbol in {BUSY, TROUBLED}:
        return f"gpu-box-{number:03}:9846"
    if symbol.startswith("GPU-5130"):
        return f"GPU-5130{number:04x}{symbol[12:]}"
    if run := _RUN.fullmatch(symbol):
        return f"{run[1]}-{run[2]}{number:03}{day}"
    return f"{symbol}-{number // 10}" if symbol in _USERS else symbol


def make(folder: Path) -> Path:
    """Make the data, where they are not there yet; return their folder. Takes half an hour of CPU time."""
    data, done = folder / "fleet", folder / "fleet" / "made"
    if done.exists():
        return data
    if not (folder / "played").exists():
        box_week.play(folder, DAYS * DAY, PLAYED)
        (folder / "played").touch()
    for box in (BUSY, TROUBLED):
        if not (folder / f"{box}-rules").exists():
            _evaluate(folder, box)
    shutil.rmtree(data, ignore_errors=True)
    midnight = (BEGIN + DAYS * DAY) // DAY * DAY
    for back in range(DAYS):
        for begin, end in _times(folder / BUSY).values():
            if begin < midnight or not back:  # what is after it is there once
                write_block(data, list(_copies(folder, begin, end, back)))
    done.touch()
    return data


def _copies(folder: Path, begin: float, end: float, back: int) -> Iterator[Copies]:
    """Say what a block is made of: the boxes' pages and rules of that time, and of how many days `back`."""
    for box in (BUSY, TROUBLED):
        troubled = 0 if back else IN_TROUBLE  # only what was played last is
        numbers = range(troubled) if box == TROUBLED else range(troubled, BOXES)
        renames = [partial(of_box, number, back) for number in numbers]
        for part in (box, f"{box}-rules"):
            for block, (first, _last) in _times(folder / part).items():
                if begin <= first < end and renames:
                    yield Copies(block, renames, later=-back * int(DAY) * 1000)


def _times(folder: Path) -> dict[Path, tuple[float, float]]:
    """Return the Unix times between which a folder's blocks are."""
    metas = {path.parent: json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("*/meta.json")}
    return {block: (meta["minTime"] / 1000, meta["maxTime"] / 1000) for block, meta in sorted(metas.items())}


def _evaluate(folder: Path, box: str) -> None:
    """Write what the rules would have left: recorded series, and ALERTS."""
    times = _times(folder / box).values()
    begin, end = min(begin for begin, _end in times), max(end for _begin, end in times)
    step = Choices().interval
    with tempfile.TemporaryDirectory(dir=folder) as beside:
        data = Path(beside) / "data"
        shutil.copytree(folder / box, data)  # as a Prometheus may compact what overlaps
        with backfill.serving(data, STEP) as url:
            recorded = list(backfill.recorded(url, begin, end, step))
        backfill.add(data, recorded)
        with backfill.serving(data, STEP) as url:
            told = chain.from_iterable(backfill.episodes(url, rule, begin, end, step) for rule in backfill.alerts())
            alerts = [line for episode in told for line in alerting(episode, step)]
        for first, last in times:  # blocks of the same times
            lines = (line for line in chain(recorded, alerts) if first <= float(line.rpartition(" ")[2]) < last)
            backfill.add(Path(beside) / "rules", lines)
        (Path(beside) / "rules").rename(folder / f"{box}-rules")


if __name__ == "__main__":
    print(make(Path(sys.argv[1])))
