"""False alerts in a week of a busy and healthy host with eight GPUs: `python bench/alert_noise.py`.

No alert of severity warning or worse may fire. The week is scripted in bench/alerting/healthy_week.py; the real daemon
polls it in simulated time, and a real Prometheus evaluates the shipped rules. With `--keep FOLDER` the scrapes are kept
there, and the next run, for example after a change to a rule, reuses them.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT / each) for each in ("bench/alerting", "tools/pictures", "tests/support")]

import backfill  # noqa: E402 - found only now
import healthy_week  # noqa: E402 - likewise
from history import BEGIN  # noqa: E402 - likewise
from jobs import INTERRUPTED  # noqa: E402 - likewise
from played import DAY, Stored  # noqa: E402 - likewise
from scenes import Scene  # noqa: E402 - likewise

from programs import conditions  # noqa: E402 - likewise

STEP = 15.0  # seconds between scrapes, and between evaluations; a week of the shipped five takes half an hour
BOX = "box"
# What makes it a busy week, by expressions over all of it.
QUIET = {
    "runs that reported": "count(count_over_time(gpuwarden_run_info[%s]))",
    "most series of runs' headroom at once": "max_over_time(count(gpuwarden_run_memory_headroom_bytes)[%s:5m])",
    "GPU-hours at the power limit": (
        'sum(increase(gpuwarden_gpu_clock_event_seconds_total{reason="sw_power_cap"}[%s])) / 3600'
    ),
    "least margin to slowdown, °C": "min(min_over_time(gpuwarden_gpu_temperature_margin_celsius[%s]))",
    "scrapes without an answer": "count_over_time((up == 0)[%s:15s])",
}


def played_in(folder: Path, scene: Scene, which: str) -> Stored:
    """Play the scene into a folder, unless it has the scrapes of `which` already."""
    stored, note, names = Stored(folder, STEP), folder / "pages.json", sorted(backfill.names())
    known = json.loads(note.read_text(encoding="utf-8")) if note.exists() else {}
    if known.get("which") == which and set(names) <= set(known["names"]):
        stored.first, stored.seconds, stored.scrapes = scene.first, scene.seconds, known["scrapes"]
        return stored
    if known:
        raise SystemExit(f"{folder} has other pages, of {known['which']}, or lacks families that rules look at")
    folder.mkdir(parents=True, exist_ok=True)
    stored.take(BOX, scene)
    note.write_text(json.dumps({"which": which, "scrapes": stored.scrapes, "names": names}), encoding="utf-8")
    return stored


def measured(url: str, days: float, scene: Scene) -> Iterator[tuple[str, float]]:
    """Print what that time contained."""
    for what, expr in QUIET.items():
        found = backfill.ask(url, "query", query=expr % f"{days * DAY:.0f}s", time=BEGIN + scene.seconds)["result"]
        yield what, float(found[0]["value"][1]) if found else 0.0
    yield "processes", sum(job.begin < scene.seconds for job in scene.jobs)
    yield "stopped by Ctrl-C", sum(job.ending is INTERRUPTED and job.end < scene.seconds for job in scene.jobs)


def table(episodes: Sequence[backfill.Episode], days: float) -> Iterator[str]:
    """Print a line for each alert."""
    counts = Counter((each.labels["severity"], each.alert) for each in episodes)
    yield f"| alert | severity | times in {days:g} days | most may be | met |"
    yield "| --- | --- | ---: | ---: | --- |"
    for rule in backfill.alerts():
        severity = rule["labels"]["severity"]
        count = counts[severity, rule["alert"]]
        most, met = ("", "") if severity == "info" else ("0", "**no**" if count else "yes")
        yield f"| {rule['alert']} | {severity} | {count} | {most} | {met} |"


def examples(episodes: Sequence[backfill.Episode]) -> Iterator[str]:
    """Print when some of the alerts fired."""
    fired: Counter[str] = Counter()
    for each in episodes:
        fired[each.alert] += 1
        if fired[each.alert] <= 3:
            about = ", ".join(f"{k}={v}" for k, v in each.labels.items() if k not in {"job", "instance", "severity"})
            hour = (each.begin - BEGIN) / 3600
            yield f"- {each.alert} on day {hour // 24:.0f} at {hour % 24:.2f} h, {each.end - each.begin:.0f} s: {about}"


def main() -> int:
    """Play and print; return exit status 1 if an alert fired."""
    parser = argparse.ArgumentParser(description="Play a healthy week, and count the alerts.")
    parser.add_argument("--days", type=float, default=7.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="for the pages, to be used again")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)  # the daemon's lines
    where, began = conditions(), time.monotonic()
    scene = healthy_week.week(options.days, options.seed)
    with tempfile.TemporaryDirectory() as folder:
        stored = played_in(options.keep or Path(folder), scene, f"{options.days:g} days, seed {options.seed}")
        played, began = time.monotonic() - began, time.monotonic()
        with stored.served() as url:
            episodes = stored.episodes(url)
            figures = list(measured(url, options.days, scene))
    loud = [each for each in episodes if each.labels["severity"] != "info"]
    polled = f"in {played:.0f} s" if stored.played else "before"
    took = f"{stored.scrapes} polls made {polled}, {time.monotonic() - began:.0f} s to evaluate"
    print(f"{where}; {took}.\n")
    print(f"{len(loud)} alerts of severity warning or critical, {len(episodes) - len(loud)} of info.\n")
    print("\n".join(table(episodes, options.days)))
    print("\n| what there was | |\n| --- | ---: |")
    print("\n".join(f"| {what} | {figure:g} |" for what, figure in figures))
    print("\n" + "\n".join(examples(episodes)))
    return int(bool(loud))


if __name__ == "__main__":
    sys.exit(main())
