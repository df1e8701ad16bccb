"""Pictures of the dashboards from a simulated day, for docs/pictures.

`history.py` records the day into build/day if it is missing. The renderer lays out Grafana's own components in
Chromium, without Grafana; npm installs it into build/ once, 700 MB. Needs Prometheus, promtool, node, npm, chromium
and pngquant.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from backfill import serving
from history import record
from page_pictures import shrink

STEP = 30.0  # seconds between polls: a day with the usual ones takes an hour to make
DAY, HOUR = 86400.0, 3600.0  # seconds
_ROOT = Path(__file__).parents[2]
_DASHBOARDS, _PICTURES = _ROOT / "grafana" / "dashboards", _ROOT / "docs" / "pictures"
_SOURCE, _RENDERER = Path(__file__).parent / "renderer", _ROOT / "build" / "renderer"


@dataclass(frozen=True, slots=True)
class Picture:
    """Upper `height` pixels of a dashboard over the last `seconds` of the day, ending `before` its end.

    `whole`: every query has data; otherwise some may have none, as that for the XIDs of the last hour.
    """

    dashboard: str
    name: str
    seconds: float
    height: int
    theme: str = "dark"
    before: float = 0.0
    chosen: Mapping[str, str] = field(default_factory=dict)
    whole: bool = True


_BOX = {"cluster": "lab", "instance": "gpu-box-1:9846"}
PICTURES = (
    Picture("gpuwarden-fleet", "fleet", DAY, 1260, whole=False),
    Picture("gpuwarden-box", "box", HOUR, 1080, chosen=_BOX, whole=False),
    Picture("gpuwarden-run", "run", HOUR, 1160),
    Picture("gpuwarden-fleet", "fleet-light", DAY, 880, theme="light", whole=False),
)


def draw_all() -> None:
    """Draw all pictures; raises RuntimeError if a panel has a problem."""
    day = _ROOT / "build" / "day"
    if not day.exists():
        record(day, DAY, STEP)
    build()
    with serving(day, STEP) as url:
        for picture in PICTURES:
            draw(picture, url, _end(day) - picture.before)


def _end(day: Path) -> float:
    """Return the Unix time of the day's last sample."""
    blocks = (json.loads(path.read_text()) for path in day.glob("*/meta.json"))
    return float(max(block["maxTime"] for block in blocks)) // 1000


def build() -> None:
    """Install the renderer if needed, and build it."""
    _RENDERER.mkdir(parents=True, exist_ok=True)
    for path in _SOURCE.iterdir():
        shutil.copy(path, _RENDERER)
    if not (_RENDERER / "node_modules").exists():
        subprocess.run(["npm", "install", "--no-audit", "--no-fund"], cwd=_RENDERER, check=True)
    subprocess.run(["node", "build.mjs"], cwd=_RENDERER, check=True)


def draw(picture: Picture, url: str, end: float, folder: Path = _PICTURES) -> None:
    """Draw a dashboard of the Prometheus at the URL.

    Raises RuntimeError if a panel has a problem, or the picture is too large.
    """
    target = folder / f"{picture.name}.png"
    chosen = {"prom": url, "from": f"{end - picture.seconds:.0f}", "to": f"{end:.0f}", "theme": picture.theme}
    chosen |= {f"var-{name}": value for name, value in picture.chosen.items()}
    arguments = [_DASHBOARDS / f"{picture.dashboard}.json", target, str(picture.height)]
    arguments += [f"{name}={value}" for name, value in chosen.items()]
    command = ["node", "shoot.mjs", *map(str, arguments)]
    said = subprocess.run(command, cwd=_RENDERER, check=False, capture_output=True, text=True).stderr.splitlines()
    problems = [line for line in said if picture.whole or not line.endswith(": no data")]
    if problems:
        raise RuntimeError("\n".join(problems))
    shrink(target)
    print(target.relative_to(_ROOT), target.stat().st_size)
