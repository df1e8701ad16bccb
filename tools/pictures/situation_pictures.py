"""Pictures of dashboards and status page in four situations, for docs/engineering/situations.md.

A situation occurs in one of two simulated hosts that the real daemon polls in fast time; Prometheus evaluates the
alert rules over its scrapes, and the renderer draws the end.
Needs what dashboard_pictures.py needs.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from backfill import add, samples, serving
from dashboard_pictures import Picture, build, draw
from history import BEGIN, BOXES, STEP, Clock, evaluate, record_box
from made_up import MadeUp
from page_pictures import Picture as PagePicture
from page_pictures import shrink, take
from situations import LOST_SECONDS, SITUATIONS, SimulatedBox, Situation, with_xid

from gpuwarden.daemon.metrics_page import read_tables
from gpuwarden.metrics.exposition import Exposition

SHOWN = 900.0  # seconds, the last ones
HEIGHT = 900  # pixels
BOX, OTHER = BOXES[:2]
_CHOSEN = {"cluster": "lab", "instance": "gpu-box-1:9846"}
_FOLDER = Path(__file__).parents[2] / "docs" / "pictures" / "situations"


async def _record(directory: Path, situation: Situation) -> float:
    """Write the host's scrapes until the situation is there; return after how many seconds that is."""
    clock = Clock()
    page, made_up, lines = Exposition(), MadeUp(BEGIN), list[str]()
    with clock.running():
        box = SimulatedBox(situation, clock)
        lost: float | None = None
        async for state in box.polls(STEP):
            if lost is None and any(gpu.fault for gpu in state.snapshot.gpus):
                lost = clock.time()
            seen = with_xid(state, lost or clock.time() - LOST_SECONDS)
            seen = made_up.add(seen, clock.now, clock.now, faulty=False)
            lines += samples(page.render(read_tables(seen)).text.decode(), clock.time(), BOX.target)
    add(directory, lines)
    return clock.now


def take_all() -> None:
    """Take the pictures."""
    _FOLDER.mkdir(parents=True, exist_ok=True)
    build()
    for situation in SITUATIONS:
        with tempfile.TemporaryDirectory() as folder:
            history = Path(folder)
            end = asyncio.run(_record(history, situation))
            asyncio.run(record_box(history, OTHER, end, end, STEP, leaks=False))  # everything else is healthy
            evaluate(history, end)
            with serving(history, STEP) as url:
                for name in ("fleet", "box", "run"):
                    chosen = {} if name == "fleet" else _CHOSEN
                    picture = Picture(
                        f"gpuwarden-{name}", f"{situation.name}-{name}", SHOWN, HEIGHT, chosen=chosen, whole=False
                    )
                    draw(picture, url, BEGIN + end, _FOLDER)
    pages = tuple(PagePicture(each.name, f"{each.name}-page", 1280, "dark", HEIGHT) for each in SITUATIONS)
    take(_FOLDER, pages)
    for each in pages:
        shrink(_FOLDER / f"{each.name}.png")
