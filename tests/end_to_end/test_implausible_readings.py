"""Nonsense that NVML returns with success, from the driver to alerts and advice: absent, counted, without effect."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from services import Daemon, Samples, end_processes, fetch, wait_until

from mock_nvml import MockNvml
from mock_nvml.control import Key
from system_parts import needs_framework

UUIDS = tuple(f"GPU-{0xA0B1C2D0 + gpu:08x}-4d4f-434b-8000-{gpu:012x}" for gpu in range(2))  # the mock's
# By GPU and the mock's setting: nonsense, and the metric that has it. The mock derives power from utilization.
NONSENSE: dict[tuple[int, Key], tuple[float, str]] = {
    (0, "temp"): (2**31, "gpuwarden_gpu_temperature_celsius"),
    (0, "memclock"): (0xFFFF, "gpuwarden_gpu_clock_hertz"),
    (0, "energy"): (2**62, "gpuwarden_gpu_energy_joules_total"),
    (0, "memtotal"): (0, "gpuwarden_gpu_memory_size_bytes"),
    (0, "pcie_width"): (0xFFFF, "gpuwarden_gpu_pcie_link_width"),
    (0, "ecc_dbe"): (0xFFFFFFFF, "gpuwarden_gpu_ecc_errors_total"),
    (1, "util"): (808334905, "gpuwarden_gpu_utilization_ratio"),
    (1, "power"): (4_200_000, "gpuwarden_gpu_power_usage_watts"),
}
# Labels of the values that are refused, where other values of the metric are right.
REFUSED = {
    "memclock": {"clock": "memory"},
    "temp": {"sensor": "core"},
    "ecc_dbe": {"type": "uncorrected", "location": "dram"},
}
# By GPU: counters, and what each may rise in an hour, in which the test has ended.
COUNTERS = {
    (0, "gpuwarden_gpu_busy_seconds_total"): 3600.0,
    (0, "gpuwarden_gpu_energy_joules_total"): 3600 * 700.0,
    (0, "gpuwarden_gpu_ecc_errors_total"): 0.0,
    (1, "gpuwarden_gpu_busy_seconds_total"): 3600.0,
}
FIT = """
import time
import keras, numpy as np
from gpuwarden.keras import GpuWarden
class Pause(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.01)
x = np.random.default_rng(1).random((640, 8), "float32")
model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(4), keras.layers.Dense(1)])
model.compile("sgd", "mse")
warden = GpuWarden(devices={"CPU:0": "%s"}, on_pressure="stop", interval=0.1)
model.fit(x, x[:, :1], epochs=10, batch_size=32, verbose=0, callbacks=[warden, Pause()])
print("updates", int(model.optimizer.iterations))
"""


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory, mock_nvml_library: Path) -> Iterator[tuple[Daemon, MockNvml]]:
    """Run a daemon on two GPUs, the first of which returns nonsense; a run may claim to use it."""
    folder = tmp_path_factory.mktemp("box")
    mock = MockNvml(mock_nvml_library, folder)
    config = folder / "config.yaml"
    config.write_text("poll: {interval: 100ms, slow_interval: 1s}\nruns: {trust_reports: true}\n")
    daemon = Daemon(folder / "daemon", "--config", str(config), env=mock.env(gpus=2))
    with end_processes(daemon):
        wait_until(lambda: daemon.samples().up() == [1, 1], "both GPUs")
        yield daemon, mock


def read_counters(page: Samples) -> dict[tuple[int, str], float]:
    """Return the counters that have a value, each as the sum over its labels."""
    found = {(gpu, name): page.all(name, uuid=UUIDS[gpu]).values() for gpu, name in COUNTERS}
    return {counter: sum(values) for counter, values in found.items() if values}


def test_nonsense(box: tuple[Daemon, MockNvml]) -> None:
    """Values that cannot be have no series and raise no alert; no counter jumps, then or once the driver is right."""
    daemon, mock = box
    wait_until(lambda: read_counters(daemon.samples()).keys() == COUNTERS.keys(), "the slow tier")
    before = read_counters(daemon.samples())
    for (gpu, setting), (value, _metric) in NONSENSE.items():
        mock.set(gpu, setting, value)
    pages = [wait_until(lambda: refused(daemon, at_least=200), "values refused many times")]
    for (gpu, setting), (_value, metric) in NONSENSE.items():
        assert not pages[0].all(metric, uuid=UUIDS[gpu], **REFUSED.get(setting, {})), metric
    assert pages[0].up() == [1, 1]
    state = json.loads(fetch(f"{daemon.url}/api/v1/state"))
    late = re.compile("timeout|responding again")  # of a busy machine
    ours = [event["text"] for event in state["events"] if "run_id" not in event]
    events = [text for text in ours if not late.search(text)]
    assert (state["condition"], [gpu["condition"] for gpu in state["gpus"]], events) == ("ok", ["ok"] * 2, [])
    mock.clear()
    pages.append(wait_until(lambda: all_again(daemon), "all values again"))
    for page in pages:
        for (gpu, name), value in read_counters(page).items():
            assert 0 <= value - before[gpu, name] <= COUNTERS[gpu, name], (gpu, name)
    assert not any(pages[-1].all("gpuwarden_incidents_total").values())
    for (gpu, _setting), (_value, metric) in NONSENSE.items():
        assert daemon.output().count(f"further ones are only counted gpu={UUIDS[gpu]} metric={metric} ") == 1


def refused(daemon: Daemon, at_least: int) -> Samples | None:
    """Return the page once so many values of each GPU have been refused."""
    page = daemon.samples()
    found = page.all("gpuwarden_gpu_errors_total", error="implausible").values()
    return page if len(found) == len(UUIDS) and min(found) >= at_least else None


def all_again(daemon: Daemon) -> Samples | None:
    """Return the page once all metrics have values."""
    page = daemon.samples()
    has_all = all(
        page.all(metric, uuid=UUIDS[gpu], **REFUSED.get(setting, {}))
        for (gpu, setting), (_, metric) in NONSENSE.items()
    )
    return page if has_all and read_counters(page).keys() == COUNTERS.keys() else None


@pytest.mark.frameworks
@needs_framework("tensorflow")
def test_fit_is_not_stopped(box: tuple[Daemon, MockNvml]) -> None:
    """A fit that stops under memory pressure makes all its steps on a GPU whose memory has 0 bytes."""
    daemon, mock = box
    mock.set(0, "memtotal", 0)
    environment = {"GPUWARDEN_SOCKET": str(daemon.socket), "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(
        [sys.executable, "-c", FIT % UUIDS[0]],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert done.stdout.split() == ["updates", "200"], done.stderr
    page = daemon.samples()
    assert list(page.all("gpuwarden_run_steps_total").values()) == [200.0]
    assert not any(page.all("gpuwarden_run_actions_total").values())
