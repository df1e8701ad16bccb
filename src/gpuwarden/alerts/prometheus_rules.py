"""Registry of all rules, and the files they are written to: for Prometheus, and for its operator on Kubernetes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from inspect import cleandoc
from typing import Any

import yaml

from gpuwarden.alerts import recording_rules
from gpuwarden.alerts.recording_rules import RecordingRule
from gpuwarden.alerts.templates import JOINS, TEXTS, xid_values
from gpuwarden.config import rule_settings
from gpuwarden.formatting import format_promql_duration
from gpuwarden.health import conditions
from gpuwarden.health.model import SUBJECT_LABELS, Condition, Subject, fill_places


@dataclass(frozen=True, slots=True)
class Group:
    """Rules that Prometheus evaluates one after the other, and no more often than every `min_interval` seconds."""

    name: str
    rules: tuple[RecordingRule | Condition, ...]
    min_interval: float = 0.0


# Groups are evaluated each by itself: what is recorded in one may be an evaluation old in the others. Those on links
# look at each link of each GPU, up to hours ago: they cost most, and tell of nothing that half a minute matters to.
# What is recorded of the fleet is read in steps of minutes and hours.
GROUPS = (
    Group("gpuwarden-joins", recording_rules.JOIN_RULES),
    Group("gpuwarden-runs", (*recording_rules.RUN_MEMORY_RULES, *conditions.RUNS)),
    Group("gpuwarden-gpus", (*recording_rules.DEVICE_MEMORY_RULES, *conditions.GPUS)),
    Group("gpuwarden-links", conditions.LINKS, min_interval=30.0),
    Group("gpuwarden-daemon", conditions.DAEMON),
    Group("gpuwarden-fleet", recording_rules.FLEET_RULES, min_interval=60.0),
)
RECORDED: Mapping[str, RecordingRule] = {
    rule.name: rule for group in GROUPS for rule in group.rules if isinstance(rule, RecordingRule)
}

# Where an alert leads: to the dashboard of what it is about, and the variables there, by label.
_DASHBOARDS: Mapping[Subject, str] = {"run": "gpuwarden-run", "gpu": "gpuwarden-box", "box": "gpuwarden-box"}
_VARIABLES = {"instance": "instance", "run_id": "run", "uuid": "gpu", "cluster": "cluster"}
# A dashboard lets people choose GPUs, and shows the instances of those.
_GPU_OF_INSTANCE = (
    '{{ with printf "gpuwarden_mig_info{cluster=%q,job=%q,instance=%q,uuid=%q}" '
    '$labels.cluster $labels.job $labels.instance $labels.uuid | query }}{{ . | first | label "gpu_uuid" | urlquery }}'
    "{{ else }}{{ $labels.uuid | urlquery }}{{ end }}"
)
_HEADER = """\
# Written by `gpuwarden rules`, which takes other thresholds too; the rules are in src/gpuwarden/health/.
# What each alert means, what to do about it, and when it is wrong: docs/reference/alerts.md.
"""
_KUBERNETES_HEADER = """\
# Written by `gpuwarden rules --kubernetes`.
"""


@dataclass(frozen=True, slots=True)
class Choices:
    """Settings of a site: `numbers` by setting, the scrape job, how often rules are evaluated, and where links lead.

    `docs` and `grafana` are what URLs begin with, without a slash at the end; without `grafana` there is no link to it.
    """

    numbers: Mapping[str, float] = field(default_factory=dict)
    job: str = "gpuwarden"
    interval: float = 5.0  # seconds: out-of-memory comes quickly, so a slower default is not waited for
    docs: str = "docs"
    grafana: str = "http://localhost:3000"

    def values(self) -> dict[str, str]:
        """Return what fills the places of rules."""
        return {
            **rule_settings.placeholder_values(self.numbers),
            **dict(xid_values()),
            **JOINS,
            **TEXTS,
            "job": self.job,
        }


def render_rule_file(choices: Choices | None = None) -> str:
    """Return the file for Prometheus, in YAML."""
    return _HEADER + _yaml({"groups": list(_groups(choices or Choices()))})


def render_prometheus_rule(choices: Choices | None = None, name: str = "gpuwarden") -> str:
    """Return the resource for Prometheus' operator, in YAML."""
    resource = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": name, "labels": {"app.kubernetes.io/name": "gpuwarden"}},
        "spec": {"groups": list(_groups(choices or Choices()))},
    }
    return _KUBERNETES_HEADER + _yaml(resource)


def render_annotations(rule: Condition, choices: Choices) -> dict[str, str]:
    """Return an alert's annotations: texts for people, and links to what helps."""
    texts = {
        "summary": rule.summary,
        "description": fill_places(rule.description, choices.values()),
        "runbook_url": f"{choices.docs}/reference/alerts.md#{rule.name.lower()}",
    }
    if choices.grafana:
        texts["dashboard_url"] = f"{choices.grafana}/d/{_DASHBOARDS[rule.subject]}?{_dashboard_query(rule)}"
    return texts


def _dashboard_query(rule: Condition) -> str:
    """Return a URL query that chooses on a dashboard what an alert is about, as far as its labels say."""
    # An empty choice would be one of nothing. A cluster is a label that few sites have.
    parts: list[str] = []
    for label in dict.fromkeys(("instance", SUBJECT_LABELS[rule.subject], "cluster")):
        value = "{{ . | urlquery }}"
        if rule.of_instances and label == "uuid":
            value = _GPU_OF_INSTANCE
        sign = "&" if parts else ""
        parts.append(f"{{{{ with $labels.{label} }}}}{sign}var-{_VARIABLES[label]}={value}{{{{ end }}}}")
    return "".join(parts)


def _groups(choices: Choices) -> Iterator[dict[str, Any]]:
    values = choices.values()
    for group in GROUPS:
        rules = [
            _record(rule, values) if isinstance(rule, RecordingRule) else _alert(rule, values, choices)
            for rule in group.rules
            if rule.expr
        ]
        yield {
            "name": group.name,
            "interval": format_promql_duration(max(choices.interval, group.min_interval)),
            "rules": rules,
        }


def _record(rule: RecordingRule, values: Mapping[str, str]) -> dict[str, Any]:
    return {"record": rule.name, "expr": fill_places(cleandoc(rule.expr), values)}


def _alert(rule: Condition, values: Mapping[str, str], choices: Choices) -> dict[str, Any]:
    timing = {"for": rule.hold, "keep_firing_for": rule.keep}
    return {
        "alert": rule.name,
        "expr": fill_places(rule.query, values),
        **{key: fill_places(duration, values) for key, duration in timing.items() if duration},
        "labels": {"severity": rule.severity},
        "annotations": render_annotations(rule, choices),
    }


class _Dumper(yaml.SafeDumper):
    """Writes expressions as they stand, line by line, and long texts folded."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def _yaml(contents: Mapping[str, Any]) -> str:
    written: str = yaml.dump(dict(contents), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
    return written
