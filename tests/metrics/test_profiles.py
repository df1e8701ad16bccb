"""Profiles of the metrics page, on the simulated machine with 8 GPUs and in promtool's tests of the rules."""

import asyncio
import subprocess
from pathlib import Path
from typing import Any

import promql_parser as promql
import pytest
import yaml

from gpuwarden.cli.commands.reference_command import minimal_alerts
from gpuwarden.config.loader import load
from gpuwarden.daemon.daemon import Daemon
from gpuwarden.daemon.metrics_page import TABLES
from gpuwarden.daemon.sources import open_source
from gpuwarden.metrics.profiles import is_minimal, select_profile
from system_parts import needs

REPOSITORY = Path(__file__).parents[2]
RULES = REPOSITORY / "deploy" / "prometheus" / "rules" / "gpuwarden.yml"
MINIMAL = {
    *("gpuwarden_gpu_up", "gpuwarden_gpu_memory_used_bytes", "gpuwarden_gpu_memory_size_bytes"),
    *("gpuwarden_gpu_memory_reserved_bytes", "gpuwarden_gpu_utilization_ratio", "gpuwarden_gpu_temperature_celsius"),
    *("gpuwarden_gpu_temperature_margin_celsius", "gpuwarden_gpu_power_usage_watts", "gpuwarden_gpu_ecc_errors_total"),
    *("gpuwarden_gpu_clock_event_seconds_total", "gpuwarden_gpu_pressure_level", "gpuwarden_run_up"),
    *("gpuwarden_run_memory_headroom_bytes", "gpuwarden_collector_success", "gpuwarden_check_status"),
}


def series(tmp_path: Path, **overrides: str) -> set[str]:
    """Return the series of the simulated machine's page, without their values."""
    settings = {"source": "simulated", "runs.socket": str(tmp_path / "run.sock")}
    config = load(None, settings | {key.replace("__", "."): value for key, value in overrides.items()})
    daemon = Daemon(config, open_source(config.source, config.simulation))
    asyncio.run(daemon.poll())
    return {line.rpartition(" ")[0] for line in daemon.text.splitlines() if not line.startswith("#")}


def names(found: set[str]) -> set[str]:
    """Return the names of series."""
    return {each.partition("{")[0] for each in found}


def test_minimal_has_at_most_200_series(tmp_path: Path) -> None:
    """The profile minimal has what a fleet needs in 200 series for 8 GPUs; of some metrics only a part."""
    minimal = series(tmp_path, metrics__profile="minimal")
    assert len(minimal) <= 200
    assert names(minimal) >= MINIMAL
    errors = {each for each in minimal if each.startswith("gpuwarden_gpu_ecc_errors_total")}
    assert all('type="uncorrected"' in each and 'lifetime="volatile"' in each for each in errors)
    assert {each for each in minimal if "temperature_celsius" in each and 'sensor="core"' not in each} == set()


def test_profiles_contain_each_other(tmp_path: Path) -> None:
    """Each profile adds metrics to the smaller one: full adds those of processes."""
    minimal, standard, full = (
        names(series(tmp_path, metrics__profile=profile)) for profile in ("minimal", "standard", "full")
    )
    assert minimal < standard < full
    assert full - standard == {
        "gpuwarden_process_gpu_memory_used_bytes",
        "gpuwarden_process_info",
    }


def test_standard_is_not_filtered() -> None:
    """The default costs nothing: the tables are passed on as they are."""
    tables: list[Any] = []
    assert select_profile(tables, "standard") is tables


def test_compatible_names_are_in_each_profile(tmp_path: Path) -> None:
    """Names that the user asks for by compat are on the page with the profile minimal too."""
    assert "DCGM_FI_DEV_FB_USED" in names(series(tmp_path, metrics__profile="minimal", compat="dcgm"))


@pytest.mark.system
def test_alerts_work_with_the_minimal_profile(tmp_path: Path) -> None:
    """The alerts that the reference lists pass their rule tests with the series of minimal alone, save for texts.

    A rule test that has no other series is the same as in test_rules_by_promtool.py, and is left out.
    """
    listed = set(minimal_alerts())
    assert {"GpuDown", "RunNearOutOfMemory", "GpuXidCritical", "GpuHardwareThermalSlowdown"} <= listed
    assert listed.isdisjoint({"GpuNvlinkDown", "GpuPowerBrake", "GpuRecoveryNeeded"})
    rules = yaml.safe_load(RULES.read_text())
    for group in rules["groups"]:
        group["rules"] = [rule for rule in group["rules"] if "record" in rule or rule["alert"] in listed]
        for rule in group["rules"]:
            rule.pop("annotations", None)  # which name owners, as far as they are known
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(rules))
    files = []
    for path in sorted((REPOSITORY / "tests" / "rules").glob("*.yml")):
        whole = yaml.safe_load(path.read_text()) | {"rule_files": ["rules.yaml"]}
        for test in whole["tests"]:
            given = test.get("input_series", ())
            test["input_series"] = [each for each in given if _is_exported(each["series"])]
            checks = test.get("alert_rule_test", ()) if len(test["input_series"]) < len(given) else ()
            test["alert_rule_test"] = [check for check in checks if check["alertname"] in listed]
            for alert in (alert for check in test["alert_rule_test"] for alert in check.get("exp_alerts", ())):
                del alert["exp_annotations"]
            test.pop("promql_expr_test", None)
        whole["tests"] = [test for test in whole["tests"] if test["alert_rule_test"]]
        if whole["tests"]:
            files.append(tmp_path / path.name)
            files[-1].write_text(yaml.safe_dump(whole))
    assert {"run_memory.yml", "heat.yml"} <= {each.name for each in files}
    done = subprocess.run(
        [needs("promtool", "prometheus"), "test", "rules", *files], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def _is_exported(selector: str) -> bool:
    """Return whether the profile minimal has a series; those of Prometheus itself are no part of it."""
    parsed = promql.parse(selector)
    assert isinstance(parsed, promql.VectorSelector)
    labels = {each.name: each.value for each in parsed.matchers.matchers}
    rows = {row.name: row for table in TABLES for row in table.rows}
    row = rows.get(str(parsed.name))
    if row is None:
        return not str(parsed.name).startswith("gpuwarden_")
    return is_minimal(row, tuple(labels[each] for each in row.labels))
