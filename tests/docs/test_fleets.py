"""docs/use/fleets.md and the queries of docs/use/dcgm-migration.md: files agree, joins give results, queries parse."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from fleet_page import FILES, read_configuration
from promql import find_unknown_names

from system_parts import needs

REPOSITORY = Path(__file__).parents[2]
USE = REPOSITORY / "docs" / "use"
SAMPLE_LIMIT = 150_000

JOINED = {
    'gpuwarden_gpu_utilization_ratio{job="gpuwarden",instance="box1:9846",host="box1",uuid="GPU-a"}': "0.1x20",
    'gpuwarden_gpu_utilization_ratio{job="gpuwarden",instance="box2:9846",host="box2",uuid="GPU-b"}': "0.1x20",
    'node_cpu_seconds_total{job="node",instance="box1:9100",host="box1",cpu="0",mode="idle"}': "0+6x20",
    'node_cpu_seconds_total{job="node",instance="box2:9100",host="box2",cpu="0",mode="idle"}': "0+54x20",
    'gpuwarden_owner_gpu_memory_used_bytes{instance="box1",uuid="GPU-a",owner_kind="pod",owner="ml/train-0"}': "7x20",
    'gpuwarden_owner_gpu_memory_used_bytes{instance="box1",uuid="GPU-b",owner_kind="pod",owner="ml/train-0"}': "5x20",
    'kube_pod_labels{instance="state:8080",namespace="ml",pod="train-0",label_team="vision"}': "1x20",
}


def test_engines_have_the_same_scrape_job() -> None:
    """The configuration of each engine has the job that rules and dashboards expect, with the limit of samples."""
    (job,) = yaml.safe_load(read_configuration("prometheus"))["scrape_configs"]
    assert (job["job_name"], job["sample_limit"]) == ("gpuwarden", SAMPLE_LIMIT)
    assert all(yaml.safe_load(read_configuration(engine))["scrape_configs"] == [job] for engine in FILES)


@pytest.mark.parametrize(
    "name",
    [
        "deploy/prometheus/prometheus.yml",
        "deploy/prometheus/agent.yml",
        "deploy/helm/gpuwarden/templates/monitor.yaml",
        "docs/understand/shared-machines.md",
    ],
)
def test_sample_limit_is_that_of_other_files(name: str) -> None:
    """Other configurations, and the page of the limit's reason, have the same limit."""
    assert re.findall(r"sample_?[lL]imit: (\d+)", (REPOSITORY / name).read_text()) == [str(SAMPLE_LIMIT)]


@pytest.mark.system
def test_joins_have_results(tmp_path: Path) -> None:
    """The joins with node_exporter and kube-state-metrics find the host and the team."""
    queries = re.findall(r"```promql\n(.*?)```", (USE / "fleets.md").read_text(), re.DOTALL)
    (busy,) = (query for query in queries if "node_cpu" in query)
    (team,) = (query for query in queries if "kube_pod_labels" in query)
    samples = ((busy, '{host="box1"}', 0.1), (team, '{label_team="vision"}', 12))
    checks = [
        {"expr": query, "eval_time": "10m", "exp_samples": [{"labels": labels, "value": value}]}
        for query, labels, value in samples
    ]
    series = [{"series": name, "values": values} for name, values in JOINED.items()]
    file = tmp_path / "joins.yml"
    file.write_text(json.dumps({"tests": [{"interval": "1m", "input_series": series, "promql_expr_test": checks}]}))
    command = [needs("promtool", "prometheus"), "test", "rules", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_replaced_queries_are_valid() -> None:
    """Each of our queries in the tables for other dashboards parses, with metrics and labels that exist."""
    text = (USE / "dcgm-migration.md").read_text()
    tables = "\n".join(re.findall(r"query by query\n(.*?)(?=\n##|\Z)", text, re.DOTALL))
    cells = [
        cell
        for row in re.findall(r"^\| .*? \| (.*) \|$", tables, re.MULTILINE)
        for cell in re.findall(r"`([^`]+)`", row)
    ]
    queries = [cell.replace("\\|", "|") for cell in cells if re.search(r"gpuwarden_\w+", cell)]
    assert len(queries) > 40
    assert {query: found for query in queries if (found := find_unknown_names(query))} == {}
