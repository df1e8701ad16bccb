"""Table of the firing alerts."""

from __future__ import annotations

from classic import BAD, DARK_BLUE, WARN, Json, Panel, Query, override, states
from looks import COLORED, HIDDEN
from panels import table
from series import active_since, firing, placed
from ways import BOX, IN_CLUSTER, link, page, run_links

from gpuwarden.alerts.prometheus_rules import Choices
from gpuwarden.health.conditions import ALERTS
from gpuwarden.health.model import fill_places

_SEVERITIES: dict[float, tuple[str, str]] = {3: ("critical", BAD), 2: ("warning", WARN), 1: ("info", DARK_BLUE)}


def alerts_table(number: int, *, height: int) -> Panel:
    """Return the table; `number` is the panel's id."""
    labels = "alertname, summary, gpu, run_name, run_id, instance, cluster, place"
    critical, warning = (firing(f'severity="{_SEVERITIES[number][0]}"') for number in (3, 2))
    # As a number, to sort by it.
    severity = f"3 * {critical} or 2 * {warning} or {firing()}"
    return table(
        number,
        "Alerts firing",
        "Firing alerts; the name of an alert links to what to do (docs/reference/alerts.md).",
        Query(f"max by ({labels}) ({_summarized(severity)})", "severity", now=True),
        Query(f"1000 * max by ({labels}) ({_summarized(active_since())})", "since", now=True),
        columns={
            "Severity": "severity",
            "Alert": "alertname",
            "Summary": "summary",
            "Since": "since",
            "GPU": "gpu",
            "Run": "run_name",
            "Cluster": "cluster",
            "Host": "instance",
            "Run id": "run_id",
            IN_CLUSTER: "place",
        },
        width=24,
        height=height,
        empty="no alerts",
        sort="Severity",
        descending=True,
        needs="Severity",  # a pending alert has none
        overrides=[
            override("Severity", mappings=states(_SEVERITIES), custom__width=75, custom__align="left", **COLORED),
            override("Alert", links=[page("What to do", '/alerts/${__data.fields["Alert"]}')], custom__width=265),
            override("Summary", mappings=_summaries()),
            override("Since", unit="dateTimeAsIsoNoDateIfToday", custom__width=165),
            override("GPU", custom__width=48),
            override("Run", links=run_links("This run"), custom__width=240),
            override("Cluster", custom__width=65),
            override("Host", links=[link(BOX, "This host", instance="Host")], custom__width=146),
            *(override(name, **HIDDEN) for name in ("Run id", IN_CLUSTER)),
        ],
    )


def _summarized(alerts: str) -> str:
    """Add the label `summary` with the alert's name, which `_summaries` replaces: series have no annotations."""
    return placed(f'label_replace({alerts}, "summary", "$1", "alertname", "(.+)")')


def _summaries() -> list[Json]:
    values = Choices().values()
    texts = {name: {"text": fill_places(alert.title, values)} for name, alert in ALERTS.items()}
    return [{"type": "value", "options": texts}]
