"""Incidents and their alerts, expected and fired: `python bench/incidents.py [NAME ...]`.

Incidents are scripted on a simulated host (bench/alerting/); the real daemon polls it in simulated time, and a real
Prometheus evaluates the shipped rules. Names, or parts of them, select incidents.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT / each) for each in ("bench/alerting", "tools/pictures", "tests/support")]

from gpu_incidents import INCIDENTS as GPU_INCIDENTS  # noqa: E402 - likewise
from history import BEGIN  # noqa: E402 - found only now
from scene_store import fired_alerts  # noqa: E402 - likewise
from scenes import Incident  # noqa: E402 - likewise
from training_incidents import INCIDENTS as TRAINING_INCIDENTS  # noqa: E402 - likewise

from programs import describe_conditions  # noqa: E402 - likewise

STEP = 5.0  # seconds between scrapes, and between evaluations, as in the shipped configuration
INCIDENTS = (*TRAINING_INCIDENTS, *GPU_INCIDENTS)


@dataclass(frozen=True, slots=True)
class Result:
    """Alerts that an incident fired: seconds from its start, by alert."""

    incident: Incident
    fired: dict[str, float]

    @property
    def missing(self) -> list[str]:
        """Alerts that it should have fired, and did not."""
        return sorted(self.incident.fires - self.fired.keys())

    @property
    def extra(self) -> list[str]:
        """Alerts that it fired, and should not have."""
        return sorted(self.fired.keys() - self.incident.fires)


def run_incidents(incidents: Sequence[Incident]) -> list[Result]:
    """Run incidents on one Prometheus, each as an instance."""
    scenes = {each.name: each.scene() for each in incidents}
    results = []
    for incident, episodes in zip(incidents, fired_alerts(scenes, STEP).values(), strict=True):
        first: dict[str, float] = {}
        for each in episodes:
            first.setdefault(each.alert, each.begin - BEGIN - scenes[incident.name].begin)
        results.append(Result(incident, first))
    return results


def render_table(results: Sequence[Result]) -> Iterator[str]:
    """Print a line for each incident."""
    yield "| incident | what happens | fires | seconds to the first | as expected |"
    yield "| --- | --- | --- | ---: | --- |"
    for each in results:
        fired = ", ".join(f"{name} ({seconds:.0f} s)" for name, seconds in each.fired.items()) or "nothing"
        wrong = [f"**not {name}**" for name in each.missing] + [f"**{name} too**" for name in each.extra]
        first = f"{min(each.fired.values()):.0f}" if each.fired else ""
        yield f"| {each.incident.name} | {each.incident.happens} | {fired} | {first} | {', '.join(wrong) or 'yes'} |"


def main() -> int:
    """Run and print; return exit status 1 if an incident did not fire exactly its alerts."""
    parser = argparse.ArgumentParser(description="Run incidents, and compare their alerts with the expected ones.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="incidents, or parts of their names; all by default")
    wanted = parser.parse_args().names
    chosen = [each for each in INCIDENTS if not wanted or any(name in each.name for name in wanted)]
    logging.disable(logging.CRITICAL)  # the daemons' lines
    began = time.monotonic()
    where = describe_conditions()
    results = run_incidents(chosen)
    right = sum(not each.missing and not each.extra for each in results)
    print(f"{where}; {right} of {len(results)} as expected, in {time.monotonic() - began:.0f} s.\n")
    print("\n".join(render_table(results)))
    return int(right < len(results))


if __name__ == "__main__":
    sys.exit(main())
