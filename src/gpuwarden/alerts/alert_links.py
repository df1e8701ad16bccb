"""Links in alerts: to the runbook, and to the page or dashboard of the run or GPU."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import quote_plus

from gpuwarden.health.model import SUBJECT_LABELS, Condition, Subject

# Dashboard of an alert's subject, and its variables by label.
_DASHBOARDS: Mapping[Subject, str] = {"run": "gpuwarden-run", "gpu": "gpuwarden-box", "box": "gpuwarden-box"}
_VARIABLES = {"instance": "instance", "run_id": "run", "uuid": "gpu", "cluster": "cluster"}
# Pages of the daemon. RunDied and RunKilled have no ID of a run that was never scraped.
_PAGES: Mapping[Subject, str] = {
    "run": "{{ with $labels.run_id }}run/{{ . }}{{ end }}",
    "gpu": "#gpu-{{ $labels.gpu }}",
    "box": "",
}
_QUERY_VALUE = "{{ . | urlquery }}"
# The dashboard selects GPUs, and shows their MIG instances.
_GPU_OF_INSTANCE = (
    '{{ with printf "gpuwarden_mig_info{cluster=%q,job=%q,instance=%q,uuid=%q}" '
    '(or $labels.cluster "") $labels.job $labels.instance $labels.uuid | query }}'
    '{{ . | first | label "gpu_uuid" | urlquery }}'
    "{{ else }}{{ $labels.uuid | urlquery }}{{ end }}"
)
_TEMPLATE = re.compile(
    r"{{ with \$labels\.(?P<known>\w+) }}(?P<then>.*?)(?:{{ else }}(?P<other>.*?))?{{ end }}"
    r"|{{ or \$labels\.(?P<preferred>\w+) \. }}"
    r"|{{ (?:\$labels\.(?P<label>\w+)|\.)(?P<is_quoted> \| urlquery)? }}"
)


@dataclass(frozen=True, slots=True)
class AlertLinks:
    """Base URLs of the links in alerts, without a slash at the end.

    `runbook_url` is that of runbooks by alert name, `dashboard_url` that of Grafana. Without them, links lead to pages
    of the daemon at `daemon_url`, by default the address that Prometheus scrapes, with `scheme`.
    """

    runbook_url: str = ""
    dashboard_url: str = ""
    daemon_url: str = ""
    scheme: str = "http"

    def runbook(self, rule: Condition) -> str:
        """Return the URL of an alert's runbook; empty if it is a page that cannot be read."""
        return f"{self.runbook_url}/{rule.name}" if self.runbook_url else self._page(rule, f"/alerts/{rule.name}")

    def dashboard(self, rule: Condition) -> str:
        """Return the URL of the dashboard or page of an alert's subject; empty if that cannot be read."""
        if not self.dashboard_url:
            return self._page(rule, "/") + _PAGES[rule.subject]
        return f"{self.dashboard_url}/d/{_DASHBOARDS[rule.subject]}?{_dashboard_query(rule)}"

    def _page(self, rule: Condition, path: str) -> str:
        if not rule.links_to_daemon:
            return ""
        if self.daemon_url:
            return f"{self.daemon_url}{path}"
        return f"{{{{ with $labels.instance }}}}{self.scheme}://{{{{ . }}}}{path}{{{{ end }}}}"


def fill_labels(template: str, labels: Mapping[str, str], value: str = "") -> str:
    """Return a summary or link as Prometheus renders it; `value` is that of the dot.

    The daemon does not query: a link to a dashboard has the UUID of a MIG instance, not of its GPU.
    """

    def render(found: re.Match[str]) -> str:
        if found["known"]:
            known = labels.get(found["known"], "")
            return fill_labels((found["then"] if known else found["other"]) or "", labels, known)
        if found["preferred"]:
            return labels.get(found["preferred"], "") or value
        text = labels.get(found["label"], "") if found["label"] else value
        return quote_plus(text) if found["is_quoted"] else text

    return _TEMPLATE.sub(render, template.replace(_GPU_OF_INSTANCE, _QUERY_VALUE))


def _dashboard_query(rule: Condition) -> str:
    """Return a URL query that selects the subject of an alert on a dashboard; labels that it lacks are left out."""
    parts: list[str] = []
    for label in dict.fromkeys(("instance", SUBJECT_LABELS[rule.subject], "cluster")):
        value = _GPU_OF_INSTANCE if rule.of_instances and label == "uuid" else _QUERY_VALUE
        sign = "&" if parts else ""
        parts.append(f"{{{{ with $labels.{label} }}}}{sign}var-{_VARIABLES[label]}={value}{{{{ end }}}}")
    return "".join(parts)
