"""False alerts in a week of a busy and healthy host with eight GPUs: `python bench/alert_noise.py`.

No alert of severity warning or worse may fire. The week is scripted in bench/alerting/healthy_week.py; the real daemon
polls it in simulated time, and a real Prometheus evaluates the shipped rules.
"""

from __future__ import annotations

import argparse
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
from scene_store import DAY_SECONDS, SceneStore  # noqa: E402 - likewise
from scenes import Scene  # noqa: E402 - likewise

from programs import describe_conditions  # noqa: E402 - likewise

STEP = 15.0  # seconds between scrapes, and between evaluations; a week of the shipped five takes half an hour
BOX = "box"
# What makes it a busy week, by expressions over all of it.
CONTENTS = {
    "runs that reported": "count(count_over_time(gpuwarden_run_info[%s]))",
    "most series of runs' headroom at once": "max_over_time(count(gpuwarden_run_memory_headroom_bytes)[%s:5m])",
    "GPU-hours at the power limit": (
        'sum(increase(gpuwarden_gpu_clock_event_seconds_total{reason="sw_power_cap"}[%s])) / 3600'
    ),
    "least margin to slowdown, °C": "min(min_over_time(gpuwarden_gpu_temperature_margin_celsius[%s]))",
    "scrapes without an answer": "count_over_time((up == 0)[%s:15s])",
}


def read_contents(url: str, days: float, scene: Scene) -> Iterator[tuple[str, float]]:
    """Yield what that time contained: name and number."""
    for what, expr in CONTENTS.items():
        found = backfill.ask(url, "query", query=expr % f"{days * DAY_SECONDS:.0f}s", time=BEGIN + scene.seconds)[
            "result"
        ]
        yield what, float(found[0]["value"][1]) if found else 0.0
    yield "processes", sum(job.begin < scene.seconds for job in scene.jobs)
    yield "stopped by Ctrl-C", sum(job.ending is INTERRUPTED and job.end < scene.seconds for job in scene.jobs)


def render_table(episodes: Sequence[backfill.Episode], days: float) -> Iterator[str]:
    """Yield the lines of the table, one for each alert."""
    counts = Counter((each.labels["severity"], each.alert) for each in episodes)
    yield f"| alert | severity | times in {days:g} days | at most | met |"
    yield "| --- | --- | ---: | ---: | --- |"
    for rule in backfill.alerts():
        severity = rule["labels"]["severity"]
        count = counts[severity, rule["alert"]]
        most, met = ("", "") if severity == "info" else ("0", "**no**" if count else "yes")
        yield f"| {rule['alert']} | {severity} | {count} | {most} | {met} |"


def render_examples(episodes: Sequence[backfill.Episode]) -> Iterator[str]:
    """Yield lines about when some of the alerts fired."""
    fired: Counter[str] = Counter()
    for each in episodes:
        fired[each.alert] += 1
        if fired[each.alert] <= 3:
            about = ", ".join(f"{k}={v}" for k, v in each.labels.items() if k not in {"job", "instance", "severity"})
            hour = (each.begin - BEGIN) / 3600
            yield f"- {each.alert} on day {hour // 24:.0f} at {hour % 24:.2f} h, {each.end - each.begin:.0f} s: {about}"


def main() -> int:
    """Run and print; return exit status 1 if an alert fired."""
    parser = argparse.ArgumentParser(description="Run a healthy week, and count the alerts.")
    parser.add_argument("--days", type=float, default=7.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)  # the daemon's lines
    where, began = describe_conditions(), time.monotonic()
    scene = healthy_week.make_week(options.days, options.seed)
    with tempfile.TemporaryDirectory() as folder:
        store = SceneStore(Path(folder), STEP)
        store.add(BOX, scene)
        polled, began = time.monotonic() - began, time.monotonic()
        with store.serve() as url:
            episodes = store.episodes(url)
            figures = list(read_contents(url, options.days, scene))
    loud = [each for each in episodes if each.labels["severity"] != "info"]
    took = f"{store.scrapes} polls in {polled:.0f} s, evaluated in {time.monotonic() - began:.0f} s"
    print(f"{where}; {took}.\n")
    print(f"{len(loud)} alerts of severity warning or critical, {len(episodes) - len(loud)} of info.\n")
    print("\n".join(render_table(episodes, options.days)))
    print("\n| content of the week | |\n| --- | ---: |")
    print("\n".join(f"| {what} | {figure:g} |" for what, figure in figures))
    print("\n" + "\n".join(render_examples(episodes)))
    return int(bool(loud))


if __name__ == "__main__":
    sys.exit(main())
