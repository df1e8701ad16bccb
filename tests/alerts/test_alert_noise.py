"""Alert quality on short simulations: the quick form of bench/incidents.py and bench/alert_noise.py."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import backfill
import healthy_week
import incidents
import pytest
import rule_pages
from healthy_week import DAY, make_week
from history import BEGIN, Clock
from jobs import INTERRUPTED
from scene_store import fired_alerts
from scenes import scrape_scene

from gpuwarden.health.conditions import ALERTS
from system_parts import needs

pytestmark = pytest.mark.system

INCIDENTS = {each.name: each for each in incidents.INCIDENTS}
CHOSEN = {"leak", "co-tenant", "hardware slowdown", "XID 13", "lost GPU", "input hangs", "poll stale"}


@pytest.fixture(autouse=True)
def _required_programs() -> Iterator[None]:
    needs("prometheus", "prometheus")
    needs("promtool", "prometheus")
    logging.disable(logging.CRITICAL)  # thousands of log lines of the daemon
    yield
    logging.disable(logging.NOTSET)


def test_incident_labels_are_alerts() -> None:
    """Each alert that labels an incident exists, and no incident is listed twice."""
    assert {alert for each in incidents.INCIDENTS for alert in each.fires} <= ALERTS.keys()
    assert len(INCIDENTS) == len(incidents.INCIDENTS)


def test_incidents_fire_their_alerts() -> None:
    """Some incidents fire exactly the alerts that they are labeled with."""
    results = incidents.run_incidents([INCIDENTS[name] for name in sorted(CHOSEN)])
    assert {each.incident.name: (each.missing, each.extra) for each in results} == dict.fromkeys(CHOSEN, ([], []))


def test_healthy_hours_are_quiet() -> None:
    """Two hours of a healthy week fire nothing of severity warning or above.

    On a warm day, with a batch that warms up, a co-tenant, a daemon restart, and Ctrl-C.
    """
    scene = make_week(seed=34)
    first, last = 2.445 * DAY, 2.535 * DAY
    happened = [each for time, each in scene.events if first < time < last]
    assert any(job.ending is INTERRUPTED and first < job.end < last for job in scene.jobs)
    assert healthy_week.start_daemon in happened
    (found,) = fired_alerts({"box": replace(scene, first=first, seconds=last)}, 15.0).values()
    assert [str(each) for each in found if each.labels["severity"] != "info"] == []


def test_evaluation_matches_promtool(tmp_path: Path) -> None:
    """Range queries over a scene find the same firing alerts as promtool, evaluation by evaluation."""
    scene = INCIDENTS["lost GPU"].scene()
    scrapes, clock = rule_pages.Scrapes(), Clock()

    async def scrape() -> None:
        async for _time, page in scrape_scene(scene, clock, rule_pages.STEP, backfill.names()):
            scrapes.add(page)

    with clock.running():
        asyncio.run(scrape())
    (found,) = fired_alerts({"box": scene}, rule_pages.STEP).values()
    seen = rule_pages.evaluate_rules(scrapes, tmp_path)
    assert found
    assert [(each.alert, each.begin - BEGIN) for each in found] == [(each.alert, each.begin) for each in seen]
    late = [mine.end - BEGIN - theirs.end for mine, theirs in zip(found, seen, strict=True)]
    assert {*late} <= {0, rule_pages.STEP}  # a series that is gone is not marked as stale here: it stays for one step


@pytest.mark.parametrize(
    ("active", "hold", "keep", "expected"),
    [
        ([0, 5, 10], 0, 0, [(0, 10)]),
        ([0, 5, 10], 10, 0, [(10, 10)]),
        ([0, 5, 15, 20, 25], 10, 0, [(25, 25)]),  # a gap restarts the hold
        ([0, 5, 10], 7, 0, [(10, 10)]),  # at the next evaluation
        ([0, 5, 30], 5, 20, [(5, 25)]),
        ([0, 5, 20], 5, 20, [(5, 40)]),  # holds again while the alert is kept firing
    ],
)
def test_holding_and_keeping(
    active: list[float], hold: float, keep: float, expected: list[tuple[float, float]]
) -> None:
    """An alert fires after its expression held for `for`, and keeps firing for `keep_firing_for`."""
    assert backfill.firing(active, hold, keep, 5.0) == expected
