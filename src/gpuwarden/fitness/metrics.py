"""Metrics of the fitness checks."""

from __future__ import annotations

from collections.abc import Mapping

from gpuwarden.fitness.model import STATUSES, Status
from gpuwarden.metrics.model import Metric, Table


class FitnessReadings(Table[Mapping[str, Status]], prefix="gpuwarden_"):
    """Fitness for jobs.

    [checks.md](checks.md) has the checks, and [check.md](../use/check.md) how to use them.
    """

    # fmt: off
    check_status = Metric[Mapping[str, Status]](
        "gpuwarden_check_status", "gauge", "", "Result of the check for the whole node: 0 = fit, 1 = warning, 2 = unfit.",
        lambda statuses: {(name,): float(STATUSES.index(status)) for name, status in statuses.items()}, labels=("check",),
        source="docs/reference/checks.md", profile="minimal")
    # fmt: on
