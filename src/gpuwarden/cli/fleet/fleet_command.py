"""Command `gpuwarden fleet init`: configuration, targets, rules and dashboards for Prometheus or VictoriaMetrics."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpuwarden.alerts import prometheus_rules
from gpuwarden.cli.common.terminal import FAILED, complain, say
from gpuwarden.config.value_types import Address

INTERVAL_SECONDS = 15.0  # between evaluations of the rules, as between scrapes
DASHBOARDS = Path(__file__).with_name("dashboards")

_SCRAPE_CONFIGS = """\
scrape_configs:
  - job_name: gpuwarden # rules and dashboards use this name
    sample_limit: 150000 # a scrape with more samples fails; docs/understand/shared-machines.md
    file_sd_configs: [{files: ["targets/*.json"]}] # relative to this file; changes are noticed without a reload
"""


@dataclass(frozen=True, slots=True)
class Engine:
    """Monitoring system: its configuration file, its form of the rules, and the commands that start it."""

    file: str
    configuration: str
    render_rules: Callable[[prometheus_rules.Choices], str]
    commands: Sequence[str]


ENGINES: Mapping[str, Engine] = {
    "prometheus": Engine(
        file="prometheus.yml",
        configuration=f"""\
global: {{scrape_interval: 15s, evaluation_interval: 15s}}
rule_files: ["rules/*.yml"]
alerting: {{alertmanagers: [{{static_configs: [{{targets: ["127.0.0.1:9093"]}}]}}]}}
{_SCRAPE_CONFIGS}""",
        render_rules=prometheus_rules.render_rule_file,
        commands=["prometheus --config.file={0}/prometheus.yml --storage.tsdb.path={0}/data"],
    ),
    "victoriametrics": Engine(
        file="scrape.yml",
        configuration=f"global: {{scrape_interval: 15s}}\n{_SCRAPE_CONFIGS}",
        render_rules=prometheus_rules.render_vmalert_rules,
        commands=[
            "victoria-metrics -promscrape.config={0}/scrape.yml -storageDataPath={0}/data",
            (
                "vmalert -rule={0}'/rules/*.yml' -disableAlertgroupLabel -datasource.url=http://127.0.0.1:8428 "
                "-remoteWrite.url=http://127.0.0.1:8428 -remoteRead.url=http://127.0.0.1:8428 "
                "-notifier.url=http://127.0.0.1:9093"
            ),
        ],
    ),
}


def init(parsed: argparse.Namespace) -> int:
    """Write the files of a fleet; none if one of them exists with other contents, unless forced."""
    folder: Path = parsed.out
    engine = ENGINES[parsed.engine]
    files = {folder / name: text for name, text in _render_files(parsed.hosts, engine)}
    changed = [path for path, text in files.items() if path.exists() and path.read_bytes() != text.encode()]
    if changed and not parsed.force:
        names = ", ".join(map(str, changed))
        complain(f"gpuwarden fleet init: these exist with other contents; --force overwrites them: {names}")
        return FAILED
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        say(f"wrote {path}")
    for command in engine.commands:
        say(f"run   {command.format(shlex.quote(str(folder)))}")
    return 0


def _render_files(hosts: Sequence[Address], engine: Engine) -> Iterator[tuple[str, str]]:
    """Yield the text of each file by its name."""
    yield engine.file, f"# Written by `gpuwarden fleet init`; see docs/use/fleets.md.\n{engine.configuration}"
    targets = [{"targets": list(dict.fromkeys(map(str, hosts)))}]
    yield "targets/gpuwarden.json", json.dumps(targets, indent=2) + "\n"
    yield "rules/gpuwarden.yml", engine.render_rules(prometheus_rules.Choices(interval=INTERVAL_SECONDS))
    for path in sorted(DASHBOARDS.glob("*.json")):
        yield f"dashboards/{path.name}", path.read_text(encoding="utf-8")
