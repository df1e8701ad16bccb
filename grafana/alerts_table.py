"""The alerts that fire now, in one table."""

from __future__ import annotations

from classic import BAD, PLAIN, WARN, Panel, Query, override, states
from looks import COLORED, HIDDEN
from panels import table
from series import firing, placed
from ways import BOX, IN_CLUSTER, ONE_RUN, link

_SEVERITIES: dict[float, tuple[str, str]] = {3: ("critical", BAD), 2: ("warning", WARN), 1: ("info", PLAIN)}


def alerts_table(number: int, *, width: int, height: int) -> Panel:
    """Return the table; `number` is the panel's id."""
    labels = ("alertname", "gpu", "run_name", "run_id", "instance", "cluster", "place")
    critical, warning = (firing(f'severity="{_SEVERITIES[number][0]}"') for number in (3, 2))
    # As a number, so that the gravest stand above.
    severity = f"3 * {critical} or 2 * {warning} or {firing()}"
    return table(
        number,
        "Alerts firing",
        "What fires now; docs/reference/alerts.md says what each alert means and what to do.",
        Query(f"max by ({', '.join(labels)}) ({placed(severity)})", "severity", now=True),
        columns={
            "Severity": "severity",
            "Alert": "alertname",
            "GPU": "gpu",
            "Run": "run_name",
            "Cluster": "cluster",
            "Box": "instance",
            "Run id": "run_id",
            IN_CLUSTER: "place",
        },
        width=width,
        height=height,
        empty="no alert fires",
        sort="Severity",
        descending=True,
        overrides=[
            override("Severity", mappings=states(_SEVERITIES), custom__width=75, custom__align="left", **COLORED),
            override("Alert", custom__width=238),
            override("GPU", custom__width=48),
            override("Run", links=[link(ONE_RUN, "This run", instance="Box", run="Run id")], custom__width=126),
            override("Cluster", custom__width=62),
            override("Box", links=[link(BOX, "This box", instance="Box")], custom__width=146),
            *(override(name, **HIDDEN) for name in ("Run id", IN_CLUSTER)),
        ],
    )
