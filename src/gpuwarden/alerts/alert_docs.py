"""Alert reference (docs/reference/alerts.md): meaning, checks, action, silence and false positives of each alert."""

from __future__ import annotations

import re
from collections.abc import Mapping

from gpuwarden.alerts import inhibition
from gpuwarden.alerts.prometheus_rules import Choices
from gpuwarden.config import rule_settings
from gpuwarden.config.value_types import DURATION
from gpuwarden.formatting import format_whole_duration
from gpuwarden.health.conditions import ALERTS
from gpuwarden.health.model import SUBJECT_LABELS, Condition, fill_places

_INTRODUCTION = """\
# Alerts

<!-- Written by `gpuwarden reference alerts` from src/gpuwarden/health/. -->

Rules for Prometheus: [deploy/prometheus/rules/gpuwarden.yml](../../deploy/prometheus/rules/gpuwarden.yml). Their
thresholds are those the [dashboards](../../grafana/dashboards) color by.

    prometheus --config.file=deploy/prometheus/prometheus.yml --storage.tsdb.path=build/prometheus

scrapes gpuwarden on the same machine every five seconds and evaluates them: <http://127.0.0.1:9090/alerts>. Where a
package has started a Prometheus on that port already, add `--web.listen-address=127.0.0.1:9091`. In a Prometheus of
your own, list the file under `rule_files` and name the scrape job `gpuwarden`. Where that Prometheus has boxes of one
name in several clusters, give their targets the label `cluster`; rules and dashboards keep them apart by it.
Alertmanager notifies people: [notifications.md](../use/notifications.md). The rules evaluate every five seconds, those
on links every thirty, and what is recorded for
[dashboards](../use/dashboards.md#long-time-ranges) comes every minute. An
alert can be no faster than your scrape interval, so keep that short for gpuwarden.

A *critical* alert is worth waking somebody, a *warning* is worth a look today, an *info* is worth a look when somebody
wants the GPU's time back.

## Other thresholds

`gpuwarden rules` prints the file; with `--kubernetes` it is a PrometheusRule for Prometheus' operator. What can be set:

| flag | default | what it is |
| --- | --- | --- |
"""

# Links in the texts of conditions are relative to docs/, as they are also sent in messages; this page lies one below.
_LINK_TO_DOCS = re.compile(r"\]\((?!#|https?:|\.\./)")


def render_alerts() -> str:
    """Return the whole page."""
    values = Choices().values()
    rows = "".join(
        f"| `{each.flag}` | {values[f'{each.name}.words']} | {each.meaning} |\n" for each in rule_settings.SETTINGS
    )
    return f"{_INTRODUCTION}{rows}{''.join(_section(rule, values) for rule in ALERTS.values())}"


def _section(rule: Condition, values: Mapping[str, str]) -> str:
    text = (
        f"\n## {rule.name}\n\n*{_timing_text(rule, values)}* {rule.means}\n\n"
        f"- **Look at** {rule.look}\n- **Do:** {rule.do}\n"
        f"- **Silence:** {_silence_text(rule)}\n- **Wrong when** {rule.wrong}\n{_hidden_text(rule)}"
    )
    return _LINK_TO_DOCS.sub("](../", fill_places(text, values))


def _timing_text(rule: Condition, values: Mapping[str, str]) -> str:
    hold, keep = fill_places(rule.hold, values), fill_places(rule.keep, values)
    parts = [rule.severity.capitalize(), f"after {_words(hold)}" if hold else "at once"]
    if keep:
        parts.append(f"until it has been over for {_words(keep)}")
    return "; ".join([", ".join(parts), *([rule.told] if rule.told else [])]) + "."


def _silence_text(rule: Condition) -> str:
    label = SUBJECT_LABELS[rule.subject]
    return f"`amtool silence add alertname={rule.name} {label}=… --duration=8h --comment=…`"


def _hidden_text(rule: Condition) -> str:
    hiding = [f"[{name}](#{name.lower()})" for name in inhibition.find_hiding(rule.name)]
    return (
        f"- **Hidden by** {' or '.join(hiding)}, where Alertmanager [is told so](../use/notifications.md).\n"
        if hiding
        else ""
    )


def _words(duration: str) -> str:
    return format_whole_duration(DURATION.read(duration))
