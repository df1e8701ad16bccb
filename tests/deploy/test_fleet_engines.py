"""Engines of a fleet: Prometheus as an agent, VictoriaMetrics and vmalert, with targets from files and HTTP."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from fleet_page import write_fleet
from services import ROOT, Process, end_processes, fetch, free_port, wait_until
from stand_in_server import TEXT, serve_answers

from system_parts import needs

pytestmark = pytest.mark.system

# All GPUs are hot. The targets have no label cluster, which the texts of alerts query by.
_HOT = re.compile(rb"(?m)^(gpuwarden_gpu_temperature_margin_celsius\{.*\}) \S+$")
PAGE = _HOT.sub(rb"\1 1", (ROOT / "tests" / "goldens" / "h100.prom").read_bytes())
GPUS = sum(line.startswith(b"gpuwarden_gpu_up{") for line in PAGE.splitlines())


@contextlib.contextmanager
def served_host() -> Iterator[str]:
    """Serve a daemon's page and, as an inventory would, the list of targets with this host; yield its address."""

    def answer(path: str) -> tuple[int, str, bytes]:
        targets = [{"targets": [address], "labels": {"cluster": "found-by-http"}}]
        return (200, TEXT, PAGE) if path == "/metrics" else (200, "application/json", json.dumps(targets).encode())

    with serve_answers(answer) as port:
        address = f"127.0.0.1:{port}"
        yield address


class VictoriaMetrics(Process):
    """A real VictoriaMetrics, which scrapes itself with `more` flags."""

    def __init__(self, folder: Path, *more: str) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        program = needs("victoria-metrics", "victoria-metrics")
        address = f"-httpListenAddr={self.url.removeprefix('http://')}"
        command = [program, f"-storageDataPath={folder}/store", address, "-search.latencyOffset=0", *more]
        super().__init__(command, folder / "victoria-metrics.log")
        wait_until(lambda: fetch(f"{self.url}/health"), "VictoriaMetrics is ready")

    def query(self, expression: str) -> dict[str, float]:
        """Return the value of each cluster."""
        # It remembers for ten seconds that a selector finds nothing: each query gets a selector of its own.
        new = f'{{nothing!="{time.monotonic_ns()}"}}'
        asked = urllib.parse.urlencode({"query": expression, "nocache": 1, "extra_filters": new})
        found = json.loads(fetch(f"{self.url}/api/v1/query?{asked}"))["data"]["result"]
        return {each["metric"].get("cluster", ""): float(each["value"][1]) for each in found}


def test_agent_sends_hosts_from_files_and_http(tmp_path: Path) -> None:
    """The shipped agent configuration sends VictoriaMetrics hosts from file_sd, and from http_sd where it is added."""
    store = VictoriaMetrics(tmp_path)
    config = yaml.safe_load((ROOT / "deploy" / "prometheus" / "agent.yml").read_text())
    assert config["remote_write"][0]["url"] == "http://127.0.0.1:8428/api/v1/write"  # Debian's port
    config["remote_write"][0] = {"url": f"{store.url}/api/v1/write", "queue_config": {"batch_send_deadline": "1s"}}
    config["global"]["scrape_interval"] = "1s"
    with served_host() as host, end_processes(store):
        write_fleet(tmp_path, host)  # its targets are those of the agent
        config["scrape_configs"][0]["http_sd_configs"] = [{"url": f"http://{host}/targets"}]
        (tmp_path / "agent.yml").write_text(json.dumps(config))  # JSON is YAML
        command = [needs("prometheus", "prometheus"), "--enable-feature=agent", f"--config.file={tmp_path}/agent.yml"]
        command += [f"--storage.agent.path={tmp_path}/agent", f"--web.listen-address=127.0.0.1:{free_port()}"]
        agent = Process(command, tmp_path / "agent.log")
        with end_processes(agent):
            expected = {"": GPUS, "found-by-http": GPUS}
            wait_until(lambda: store.query("count by (cluster) (gpuwarden_gpu_up)") == expected, "the GPUs of both")


def test_victoriametrics_runs_the_files_of_the_page(tmp_path: Path) -> None:
    """VictoriaMetrics scrapes the targets of docs/use/fleets.md, and vmalert evaluates its rules there."""
    with served_host() as host:
        write_fleet(tmp_path, host, "victoriametrics")
        scrape = tmp_path / "scrape.yml"
        scrape.write_text(scrape.read_text().replace("scrape_interval: 15s", "scrape_interval: 1s"))
        rules = tmp_path / "rules" / "gpuwarden.yml"
        rules.write_text(re.sub(r"\b(for|interval): \w+", r"\1: 1s", rules.read_text()))
        store = VictoriaMetrics(tmp_path, f"-promscrape.config={scrape}")
        flags = (f"-{name}.url={store.url}" for name in ("datasource", "remoteWrite", "remoteRead", "notifier"))
        command = [needs("vmalert", "victoria-metrics"), f"-rule={tmp_path}/rules/*.yml", "-disableAlertgroupLabel"]
        address = f"-httpListenAddr=127.0.0.1:{free_port()}"
        with end_processes(store):
            wait_until(lambda: store.query("count(gpuwarden_gpu_up)") == {"": GPUS}, "the host's GPUs")
            alerting = Process([*command, *flags, address, "-remoteWrite.flushInterval=1s"], tmp_path / "vmalert.log")
            with end_processes(alerting):
                hot = 'count(ALERTS{alertname="GpuNearThermalSlowdown",alertstate="firing"})'
                wait_until(lambda: store.query(hot) == {"": GPUS}, "the alerts of the hot GPUs")


def test_fleet_configuration_is_accepted(tmp_path: Path) -> None:
    """Promtool accepts the configuration of docs/use/fleets.md, and the agent's configuration."""
    write_fleet(tmp_path, "box1:9846")
    (tmp_path / "agent.yml").write_text((ROOT / "deploy" / "prometheus" / "agent.yml").read_text())
    promtool = needs("promtool", "prometheus")
    for more in (["prometheus.yml"], ["--agent", "agent.yml"]):
        done = subprocess.run(
            [promtool, "check", "config", *more], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
