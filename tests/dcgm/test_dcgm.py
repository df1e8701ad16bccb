"""Metrics with dcgm-exporter's names (`compat: dcgm`), with which its dashboards and alerts keep working."""

from __future__ import annotations

import asyncio
import contextlib
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import promql_parser
import pytest
from commands import run_command
from offenders import listing_offenders
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from promql import parse_grouping, parse_selectors
from recorded_captures import poll_once
from services import Daemon, Prometheus, Samples, end_processes, wait_until
from simulated_box import Box

from gpuwarden.daemon.metrics_page import read_tables
from gpuwarden.dcgm.entity import LABELS
from gpuwarden.dcgm.metrics import DcgmMetric, DcgmReadings
from gpuwarden.dcgm.page import DcgmPage, host_name
from gpuwarden.dcgm.rates import CounterRates
from gpuwarden.gpu.metrics import GpuReadings, MigReadings
from gpuwarden.gpu.poller import Poller
from gpuwarden.gpu.reader import DEFAULT_PLAN
from gpuwarden.gpu.snapshot import EventCount, Gpu, MigInstance, Snapshot
from gpuwarden.metrics.exposition import Exposition, MetricsPage
from gpuwarden.metrics.model import Metric
from gpuwarden.nvml.identity import GpuIdentity, MigIdentity
from gpuwarden.state import State
from mock_nvml import MockNvml
from system_parts import needs

GPUS = 8
MIB = 2**20

# Queries of dashboard 12239: first its original version (schema 22, by `instance`), then the one in dcgm-exporter's
# repository, grafana/dcgm-exporter-dashboard.json at 068798b (schema 37, by `Hostname`). Each variable has the value
# that Grafana fills in for "All". The misspelled `uuid` is the dashboard's own.
SHARED = 'Hostname=~".+", gpu=~".+"'
DASHBOARD = (
    'DCGM_FI_DEV_GPU_TEMP{instance=~".+", gpu=~".+"}',
    'avg(DCGM_FI_DEV_GPU_TEMP{instance=~".+", gpu=~".+"})',
    'DCGM_FI_DEV_POWER_USAGE{instance=~".+", gpu=~".+"}',
    'sum(DCGM_FI_DEV_POWER_USAGE{instance=~".+", gpu=~".+"})',
    'DCGM_FI_DEV_SM_CLOCK{instance=~".+", gpu=~".+"} * 1000000',
    'DCGM_FI_DEV_GPU_UTIL{instance=~".+", gpu=~".+"}',
    'DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{instance=~".+", gpu=~".+"}',
    'DCGM_FI_DEV_FB_USED{instance=~".+", gpu=~".+"}',
    f"max(DCGM_FI_DEV_GPU_TEMP{{{SHARED}}}) by (Hostname, gpu, uuid)",
    f"avg(DCGM_FI_DEV_GPU_TEMP{{{SHARED}}})",
    f"max(DCGM_FI_DEV_POWER_USAGE{{{SHARED}}}) by (Hostname, gpu, uuid)",
    f"sum(max(DCGM_FI_DEV_POWER_USAGE{{{SHARED}}}) by (gpu))",
    f"max(DCGM_FI_DEV_SM_CLOCK{{{SHARED}}} * 1000000) by (Hostname, UUID, gpu)",
    f"max(DCGM_FI_PROF_GR_ENGINE_ACTIVE{{{SHARED}}}) by (Hostname, gpu, GPU_I_ID, GPU_I_PROFILE)",
    f"max(DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{{{SHARED}}}) by (Hostname, gpu, GPU_I_ID, GPU_I_PROFILE)",
    f"max(DCGM_FI_DEV_FB_USED{{{SHARED}}}) by (Hostname, gpu, GPU_I_ID, GPU_I_PROFILE)",
    'DCGM_FI_DEV_FB_FREE{Hostname=~".+"}',
)
# Distinct conditions of public rule sets, found by searching public repositories for DCGM_FI_ in `expr:`.
ALERTS = (
    "DCGM_FI_DEV_GPU_TEMP > 85",
    "DCGM_FI_DEV_MEMORY_TEMP > 95",
    "DCGM_FI_DEV_GPU_TEMP > DCGM_FI_DEV_SLOWDOWN_TEMP - 5",
    "DCGM_FI_DEV_XID_ERRORS > 0",
    "changes(DCGM_FI_DEV_XID_ERRORS[5m]) > 0",
    "increase(DCGM_FI_DEV_XID_ERRORS[5m]) > 0",
    "(DCGM_FI_DEV_FB_USED / (DCGM_FI_DEV_FB_USED + DCGM_FI_DEV_FB_FREE)) * 100 > 95",
    "DCGM_FI_DEV_FB_USED / DCGM_FI_DEV_FB_TOTAL > 0.90",
    "DCGM_FI_DEV_FB_USED_PERCENT > 0.95",
    "rate(DCGM_FI_DEV_THERMAL_VIOLATION[5m]) > 0",
    "rate(DCGM_FI_DEV_POWER_VIOLATION[5m]) > 0",
    "increase(DCGM_FI_DEV_ECC_DBE_VOL_TOTAL[5m]) > 0",
    "DCGM_FI_DEV_ECC_DBE_AGG_TOTAL > 0",
    "increase(DCGM_FI_DEV_ECC_SBE_VOL_TOTAL[1h]) > 100",
    "DCGM_FI_DEV_ROW_REMAP_FAILURE > 0",
    "DCGM_FI_DEV_ROW_REMAP_PENDING > 0",
    "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS > 0",
    "DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS > 8",
    "rate(DCGM_FI_DEV_PCIE_REPLAY_COUNTER[5m]) > 1",
    "DCGM_FI_DEV_POWER_USAGE / DCGM_FI_DEV_POWER_MGMT_LIMIT > 0.95",
    "DCGM_FI_DEV_SM_CLOCK < 1100 and DCGM_FI_DEV_GPU_UTIL > 80",
    "avg_over_time(DCGM_FI_DEV_GPU_UTIL[30m]) < 5",
    "avg_over_time(DCGM_FI_PROF_GR_ENGINE_ACTIVE[15m]) < 0.2",
    "avg by (Hostname, gpu) (DCGM_FI_PROF_SM_ACTIVE) < 0.1",
    "DCGM_FI_PROF_DRAM_ACTIVE > 0.8",
    "rate(DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION[5m]) / 1000 > 600",
    "increase(DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL[5m]) > 0",
    "increase(DCGM_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL[5m]) > 0",
    "count(DCGM_FI_DEV_GPU_TEMP) < 8",
)
# gpuwarden's metric, its DCGM name, and the factor between the two.
UNITS: tuple[tuple[str, dict[str, str], str, float], ...] = (
    ("gpuwarden_gpu_clock_hertz", {"clock": "sm"}, "DCGM_FI_DEV_SM_CLOCK", 1e-6),
    ("gpuwarden_gpu_clock_hertz", {"clock": "memory"}, "DCGM_FI_DEV_MEM_CLOCK", 1e-6),
    ("gpuwarden_gpu_clock_max_hertz", {"clock": "sm"}, "DCGM_FI_DEV_MAX_SM_CLOCK", 1e-6),
    ("gpuwarden_gpu_temperature_celsius", {"sensor": "core"}, "DCGM_FI_DEV_GPU_TEMP", 1),
    ("gpuwarden_gpu_temperature_threshold_celsius", {"threshold": "slowdown"}, "DCGM_FI_DEV_SLOWDOWN_TEMP", 1),
    ("gpuwarden_gpu_power_usage_watts", {}, "DCGM_FI_DEV_POWER_USAGE", 1),
    ("gpuwarden_gpu_power_limit_watts", {"limit": "enforced"}, "DCGM_FI_DEV_ENFORCED_POWER_LIMIT", 1),
    ("gpuwarden_gpu_power_limit_watts", {"limit": "requested"}, "DCGM_FI_DEV_POWER_MGMT_LIMIT", 1),
    ("gpuwarden_gpu_energy_joules_total", {}, "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", 1e3),
    ("gpuwarden_gpu_utilization_ratio", {}, "DCGM_FI_DEV_GPU_UTIL", 100),
    ("gpuwarden_gpu_memory_bandwidth_utilization_ratio", {}, "DCGM_FI_DEV_MEM_COPY_UTIL", 100),
    ("gpuwarden_gpu_memory_size_bytes", {}, "DCGM_FI_DEV_FB_TOTAL", 1 / MIB),
    ("gpuwarden_gpu_memory_used_bytes", {}, "DCGM_FI_DEV_FB_USED", 1 / MIB),
    ("gpuwarden_gpu_memory_free_bytes", {}, "DCGM_FI_DEV_FB_FREE", 1 / MIB),
    ("gpuwarden_gpu_memory_reserved_bytes", {}, "DCGM_FI_DEV_FB_RESERVED", 1 / MIB),
    ("gpuwarden_gpu_performance_state", {}, "DCGM_FI_DEV_PSTATE", 1),
    ("gpuwarden_gpu_temperature_celsius", {"sensor": "memory"}, "DCGM_FI_DEV_MEMORY_TEMP", 1),
    ("gpuwarden_gpu_power_limit_watts", {"limit": "max"}, "DCGM_FI_DEV_POWER_MGMT_LIMIT_MAX", 1),
    ("gpuwarden_gpu_engine_utilization_ratio", {"engine": "decoder"}, "DCGM_FI_DEV_DEC_UTIL", 100),
    ("gpuwarden_gpu_clock_event_seconds_total", {"reason": "sw_power_cap"}, "DCGM_FI_DEV_POWER_VIOLATION", 1e9),
    ("gpuwarden_gpu_remapped_rows", {"cause": "uncorrectable"}, "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS", 1),
    ("gpuwarden_gpu_row_remap_failed", {}, "DCGM_FI_DEV_ROW_REMAP_FAILURE", 1),
    ("gpuwarden_gpu_pcie_replays_total", {}, "DCGM_FI_DEV_PCIE_REPLAY_COUNTER", 1),
    ("gpuwarden_gpu_pcie_link_width", {}, "DCGM_FI_DEV_PCIE_LINK_WIDTH", 1),
    ("gpuwarden_gpu_nvlink_errors_total", {"type": "replay"}, "DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL", 1),
    ("gpuwarden_gpu_bar1_size_bytes", {}, "DCGM_FI_DEV_BAR1_TOTAL", 1 / MIB),
    ("gpuwarden_gpu_sm_active_ratio", {}, "DCGM_FI_PROF_SM_ACTIVE", 1),
    ("gpuwarden_gpu_pipe_active_ratio", {"pipe": "tensor"}, "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", 1),
    ("gpuwarden_gpu_dram_active_ratio", {}, "DCGM_FI_PROF_DRAM_ACTIVE", 1),
)


def polled_twice(box: Box) -> Snapshot:
    """Poll a host as the daemon does, the second time when the rates from two readings are due."""

    async def polls() -> Snapshot:
        poller = Poller(box.nvml, 30, clock=box.clock)
        await poller.poll()
        box.clock.sleep(DEFAULT_PLAN.slow_interval)
        return await poller.poll()

    return asyncio.run(polls())


def render_page(snapshot: Snapshot, hostname: str = "box") -> MetricsPage:
    """Render a poll's page with both sets of names."""
    state = State(source="simulated", poll_interval=1.0, snapshot=snapshot)
    again = DcgmPage(hostname)
    again.add_poll(state)
    return Exposition().render([*read_tables(state), *again.read_tables(state)])


def samples(page: MetricsPage, name: str, labels: Mapping[str, str]) -> dict[str, float]:
    """Return the values of a metric by the GPU's UUID."""
    found = Samples(page.text.decode()).all(name, **labels)
    by_labels = [(dict(each), value) for each, value in found.items()]
    return {each.get("uuid") or each["UUID"]: value for each, value in by_labels}


class TestValues:
    """Readings in DCGM's units."""

    def test_values_are_converted(self) -> None:
        """Values are in MiB, percent, MHz, mJ and W, for each GPU."""
        page = render_page(polled_twice(Box(GPUS)))
        with listing_offenders() as case:
            for ours, labels, theirs, factor in UNITS:
                expected = {uuid: value * factor for uuid, value in samples(page, ours, labels).items()}
                with case(theirs):
                    assert len(expected) == GPUS
                    assert samples(page, theirs, {}) == pytest.approx(expected, abs=1e-6)

    def test_numbers_are_rounded(self) -> None:
        """A percentage that the driver reports as 29 is 29, not 28.999999999999996."""
        page = render_page(poll_once(Box(GPUS).nvml))
        assert all(value == int(value) for value in samples(page, "DCGM_FI_DEV_GPU_UTIL", {}).values())
        assert all(value == int(value) for value in samples(page, "DCGM_FI_DEV_SM_CLOCK", {}).values())

    def test_used_ratio_excludes_reserved_memory(self) -> None:
        """As in DCGM, memory reserved by the driver is in neither part of the ratio."""
        page = render_page(poll_once(Box(GPUS).nvml))
        size, used, reserved = (
            samples(page, f"gpuwarden_gpu_memory_{what}_bytes", {}) for what in ("size", "used", "reserved")
        )
        expected = {uuid: used[uuid] / (size[uuid] - reserved[uuid]) for uuid in size}
        assert samples(page, "DCGM_FI_DEV_FB_USED_PERCENT", {}) == pytest.approx(expected, abs=1e-6)

    def test_clock_event_reasons_are_the_nvml_mask(self) -> None:
        """The bit mask is the one that the driver reports."""
        box = Box(GPUS)
        box.simulation.gpu(0).hold_temperature(temperature=95)
        snapshot = poll_once(box.nvml)
        masks = {
            gpu.identity.uuid: box.nvml.nvmlDeviceGetCurrentClocksEventReasons(box.handle(gpu.identity.index))
            for gpu in snapshot.gpus
        }
        assert any(masks.values())
        page = render_page(snapshot)
        assert samples(page, "DCGM_FI_DEV_CLOCKS_EVENT_REASONS", {}) == masks
        assert samples(page, "DCGM_FI_DEV_CLOCK_THROTTLE_REASONS", {}) == masks

    def test_lost_gpu_has_no_samples(self) -> None:
        """A GPU that does not respond exports neither old values nor DCGM's blank values."""
        box = Box(2)
        whole = poll_once(box.nvml)
        box.simulation.gpu(0).fail("nvmlDeviceGetTemperature", 15)
        page = render_page(poll_once(box.nvml))
        assert samples(page, "DCGM_FI_DEV_FB_USED", {}).keys() == {whole.gpus[1].identity.uuid}


Read: TypeAlias = "dict[Metric[Any], Any]"
DIVIDED = GpuIdentity("GPU-0", 0, "NVIDIA H100 80GB HBM3", "00000000:10:00.0", "")


def instance(name: str, gpu_instance: int, compute_instance: int, profile: str, used: int) -> MigInstance:
    """Return a MIG instance with some memory and activity."""
    readings: Read = {
        MigReadings.memory_size_bytes: 10 << 30,
        MigReadings.memory_reserved_bytes: 1 << 30,
        MigReadings.memory_used_bytes: used,
        MigReadings.graphics_engine_active_ratio: 0.25,
        MigReadings.pipe_active_ratio: {("tensor",): 0.125},
    }
    return MigInstance(MigIdentity(name, gpu_instance, compute_instance, profile), readings)


def dcgm_samples(gpu: Gpu, **access: bool) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Return the labels and value of each DCGM sample about a GPU, by the sample's name."""
    state = State(source="nvml", poll_interval=1.0, snapshot=Snapshot(1.0, 0.0, None, gpus=(gpu,)), access=access)
    page = Exposition().render(DcgmPage("box").read_tables(state))
    families = parse_text(page.text.decode())
    return {family.name: [(sample.labels, sample.value) for sample in family.samples] for family in families}


class TestInstances:
    """A GPU with MIG instances, labeled as in dcgm-exporter."""

    def test_memory_and_activity_are_by_instance(self) -> None:
        """Values of instances are not exported for the GPU too, so that sums are right; GPU values appear once."""
        mig = (instance("MIG-1", 1, 0, "1g.10gb", 3 << 30), instance("MIG-2", 2, 0, "1g.10gb", 6 << 30))
        readings = {GpuReadings.memory_used_bytes: 9 << 30, GpuReadings.power_usage_watts: 300.0}
        found = dcgm_samples(Gpu(DIVIDED, None, readings=readings, mig=mig))
        used = {labels["GPU_I_ID"]: value for labels, value in found["DCGM_FI_DEV_FB_USED"]}
        assert used == {"1": 3072, "2": 6144}
        assert [value for _, value in found["DCGM_FI_DEV_FB_USED_PERCENT"]] == pytest.approx([3 / 9, 6 / 9], abs=1e-6)
        assert [value for _, value in found["DCGM_FI_PROF_GR_ENGINE_ACTIVE"]] == [0.25, 0.25]
        assert [value for _, value in found["DCGM_FI_PROF_PIPE_TENSOR_ACTIVE"]] == [0.125, 0.125]
        assert [(labels["GPU_I_ID"], value) for labels, value in found["DCGM_FI_DEV_POWER_USAGE"]] == [("", 300)]
        assert {labels["UUID"] for labels, _ in found["DCGM_FI_DEV_FB_USED"]} == {"GPU-0"}

    def test_compute_instances_have_their_gpu_instances_labels(self) -> None:
        """Compute instances of one GPU instance share its memory and DCGM labels, without duplicate series."""
        mig = tuple(instance(f"MIG-{number}", 5, number, "1c.3g.40gb", 2 << 30) for number in range(3))
        found = dcgm_samples(Gpu(DIVIDED, None, mig=mig))
        ((labels, value),) = found["DCGM_FI_DEV_FB_USED"]
        assert (labels["GPU_I_PROFILE"], labels["GPU_I_ID"], value) == ("3g.40gb", "5", 2048)


class TestComputedValues:
    """Computed values."""

    def test_last_xid(self) -> None:
        """The value is the last code, with DCGM's labels for it, or 0 without an XID, whatever the source."""
        xids = {31: EventCount(7, last=100.0), 79: EventCount(1, last=300.0), 13: EventCount(2, last=200.0)}
        ((labels, value),) = dcgm_samples(Gpu(DIVIDED, None, xids=xids))["DCGM_FI_DEV_XID_ERRORS"]
        assert (labels["err_code"], value) == ("79", 79)
        assert "bus" in labels["err_msg"]
        for listening in (True, False):
            found = dcgm_samples(Gpu(DIVIDED, None), nvml_events=listening)
            ((labels, value),) = found["DCGM_FI_DEV_XID_ERRORS"]
            assert (labels["err_code"], value) == ("0", 0)

    def test_engine_activity_falls_back_to_utilization(self) -> None:
        """A GPU before Hopper has no GPM, so the driver's utilization is exported."""
        found = dcgm_samples(Gpu(DIVIDED, None, readings={GpuReadings.utilization_ratio: 0.5}))
        assert [value for _, value in found["DCGM_FI_PROF_GR_ENGINE_ACTIVE"]] == [0.5]

    def test_pcie_traffic_falls_back_to_gpm(self) -> None:
        """A GPU with byte counters that are too narrow, such as an H200, exports the mean from GPM."""
        traffic: Any = {("transmit",): 3.4e9, ("receive",): 57.3e9}
        found = dcgm_samples(Gpu(DIVIDED, None, readings={GpuReadings.pcie_mean_throughput_bytes_per_second: traffic}))
        assert [value for _, value in found["DCGM_FI_PROF_PCIE_TX_BYTES"]] == [3.4e9]
        assert [value for _, value in found["DCGM_FI_DEV_PCIE_RX_THROUGHPUT"]] == [57.3e6]

    def test_errors_are_added_up_over_locations(self) -> None:
        """DCGM's totals cover all locations."""
        errors: Any = {
            ("corrected", "volatile", "sram"): 1,
            ("corrected", "volatile", "dram"): 2,
            ("uncorrected", "volatile", "dram"): 4,
            ("uncorrected", "aggregate", "dram"): 8,
        }
        found = dcgm_samples(Gpu(DIVIDED, None, readings={GpuReadings.ecc_errors_total: errors}))
        totals = {name: samples[0][1] for name, samples in found.items()}
        assert totals == {
            "DCGM_FI_DEV_ECC_SBE_VOL_TOTAL": 3,
            "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL": 4,
            "DCGM_FI_DEV_ECC_DBE_AGG_TOTAL": 8,
            "DCGM_FI_DEV_XID_ERRORS": 0,
        }


class TestRates:
    """Rates of traffic, which gpuwarden exports as a counter."""

    COUNTER = GpuReadings.nvlink_bytes_total

    def rate_after(self, *reads: tuple[float, int | None]) -> float | None:
        """Return the rate after polls with these read times and values; None is a poll without the value."""
        rates = CounterRates((self.COUNTER,))
        for number, (slow_taken, value) in enumerate(reads):
            readings: Read = {} if value is None else {self.COUNTER: {("transmit",): value}}
            rates.add_readings((Gpu(DIVIDED, None, readings=readings, taken=float(number), slow_taken=slow_taken),))
        return rates.rate("GPU-0", self.COUNTER, "transmit")

    def test_rate_is_between_two_reads(self) -> None:
        """Polls that repeat a ten-second-old reading neither lower nor double the rate."""
        polls = [(second // 10 * 10.0, 1000 * (second // 10)) for second in range(36)]
        assert self.rate_after(*polls) == 100
        assert self.rate_after(*polls[:10]) is None  # read only once

    def test_idle_link_has_rate_0(self) -> None:
        """A counter without a change is distinguished from one that was not read again yet."""
        busy = [(0.0, 0), (10.0, 5000), (10.0, 5000)]
        assert self.rate_after(*busy) == 500
        assert self.rate_after(*busy, (20.0, 5000)) == 0

    @pytest.mark.parametrize("rest", range(1, 16))
    def test_rate_after_idle_time(self, rest: int) -> None:
        """Traffic after any idle time is divided by the time since the last read, not since the last poll."""
        polls = [(second // 15 * 15.0, 0) for second in range(15 * rest)]
        assert self.rate_after(*polls, (15.0 * rest, 15_000)) == 1000

    def test_counter_that_is_read_in_each_poll(self) -> None:
        """A reading that is not of the slow tier has the time of the poll."""
        counter = GpuReadings.busy_seconds_total
        assert counter.tier == "poll"
        assert self.COUNTER.tier == "slow"
        rates = CounterRates((counter,))
        for taken, busy in ((0.0, 0.0), (2.0, 1.0)):
            rates.add_readings((Gpu(DIVIDED, None, readings={counter: {(): busy}}, taken=taken, slow_taken=0.0),))
        assert rates.rate("GPU-0", counter) == 0.5

    def test_reload_of_the_driver_gives_no_rate(self) -> None:
        """A counter that decreased or was missing restarts."""
        assert self.rate_after((0.0, 9000), (10.0, 100)) is None
        assert self.rate_after((0.0, 0), (10.0, 5000), (20.0, None), (30.0, 9000)) is None

    def test_pcie_counter_takes_precedence(self) -> None:
        """The rate of counted bytes is exact, so it takes precedence over the mean from GPM."""
        page = DcgmPage("box")
        for total in (0, 10):
            counted: Any = {("transmit",): total * 10**9}
            mean: Any = {("transmit",): 7.0}
            readings: Read = {
                GpuReadings.pcie_bytes_total: counted,
                GpuReadings.pcie_mean_throughput_bytes_per_second: mean,
            }
            gpu = Gpu(DIVIDED, None, readings=readings, slow_taken=float(total))
            state = State(source="nvml", poll_interval=1.0, snapshot=Snapshot(1.0, 0.0, None, gpus=(gpu,)))
            page.add_poll(state)
        rendered = Exposition().render(page.read_tables(state))
        assert samples(rendered, "DCGM_FI_PROF_PCIE_TX_BYTES", {}) == {"GPU-0": 1e9}

    def test_nvlink_total_covers_both_directions(self) -> None:
        """DCGM's total is in MB/s for both directions."""
        page = DcgmPage("box")
        for total in (0, 10):
            both: Any = {("transmit",): total * 10**9, ("receive",): total * 10**9}
            gpu = Gpu(DIVIDED, None, readings={GpuReadings.nvlink_bytes_total: both}, slow_taken=float(total))
            state = State(source="nvml", poll_interval=1.0, snapshot=Snapshot(1.0, 0.0, None, gpus=(gpu,)))
            page.add_poll(state)
        rendered = Exposition().render(page.read_tables(state))
        assert samples(rendered, "DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL", {}) == {"GPU-0": 2000}
        assert samples(rendered, "DCGM_FI_PROF_NVLINK_TX_BYTES", {}) == {"GPU-0": 1e9}


class TestPage:
    """Page as parsed by Prometheus and its tools."""

    def test_labels_are_those_of_dcgm_exporter(self) -> None:
        """Each sample has dcgm-exporter's GPU labels, and the host name under the older and the newer label."""
        found = [f for f in parse_text(render_page(poll_once(Box(2).nvml)).text.decode()) if f.name.startswith("DCGM_")]
        assert {tuple(sorted(sample.labels)) for family in found for sample in family.samples} >= {
            tuple(sorted(LABELS))
        }
        (temperature,) = [family for family in found if family.name == "DCGM_FI_DEV_GPU_TEMP"]
        assert temperature.type == "gauge"
        assert temperature.samples[1].labels == {
            "gpu": "1",
            "UUID": "GPU-51300000-0000-4000-8000-000000000001",
            "pci_bus_id": "00000000:11:00.0",
            "device": "nvidia1",
            "modelName": "NVIDIA H100 80GB HBM3 (simulated)",
            "Hostname": "box",
            "hostname": "box",
            "DCGM_FI_DRIVER_VERSION": "590.48.01",
            "GPU_I_PROFILE": "",
            "GPU_I_ID": "",
        }

    def test_host_is_named_as_dcgm_exporter_does(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The host name is NODE_NAME in Kubernetes, else the system's."""
        monkeypatch.setenv("NODE_NAME", "node-7")
        assert host_name() == "node-7"
        monkeypatch.delenv("NODE_NAME")
        assert host_name() == Path("/proc/sys/kernel/hostname").read_text().strip()

    def test_promtool_accepts_the_page(self) -> None:
        """The page parses; promtool's style remarks concern only DCGM's names."""
        promtool = needs("promtool", "prometheus")
        page = render_page(poll_once(Box(2).nvml)).text
        done = subprocess.run([promtool, "check", "metrics"], input=page, capture_output=True, check=False)
        remarks = (done.stdout + done.stderr).decode().splitlines()
        assert done.returncode in (0, 3), remarks  # 3: style remarks
        assert [remark for remark in remarks if not remark.startswith("DCGM_FI_")] == []

    def test_openmetrics_page_parses(self) -> None:
        """In OpenMetrics, where counter names end in _total, DCGM's counters have type unknown and the same values."""
        page = render_page(poll_once(Box(2).nvml))
        found = {family.name: family for family in parse_openmetrics(page.openmetrics.decode())}
        energy = found["DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION"]
        assert energy.type == "unknown"
        in_text = samples(page, energy.name, {})
        assert {sample.labels["UUID"]: sample.value for sample in energy.samples} == in_text

    def test_off_by_default(self) -> None:
        """No DCGM name is exported by default."""
        done = run_command("once", "--source", "simulated")
        assert "gpuwarden_gpu_up" in done.stdout
        assert "DCGM" not in done.stdout

    def test_rows_have_dcgm_names(self) -> None:
        """A row with another name fails at import."""
        with pytest.raises(ValueError, match="fields are named DCGM_FI_"):
            DcgmMetric("gpuwarden_gpu_up", "gauge", "", "Up.", lambda _: None)

    def test_help_is_one_sentence(self) -> None:
        """The help of every row is one sentence with the unit."""
        for row in DcgmReadings.rows:
            assert re.fullmatch(r"[A-Z][^\"\\]*[^.]\.", row.help), row.help
            assert row.source.startswith("gpuwarden_"), row.name


def without_threshold(condition: str) -> str:
    """Return the left side of a comparison, which has a value whether the condition holds or not."""
    parsed = promql_parser.parse(condition)
    assert isinstance(parsed, promql_parser.BinaryExpr), condition
    if str(parsed.op) == "and":
        return re.sub(r" [<>] \d+", "", condition)
    return condition.rpartition(" > " if " > " in condition else " < ")[0]


def test_simulated_host_exports_the_dashboards_metrics() -> None:
    """The simulated host exports each metric and label in the queries of dashboard 12239."""
    page = render_page(polled_twice(Box(GPUS)))
    carried = {family.name: set(family.samples[0].labels) for family in parse_text(page.text.decode())}
    for query in DASHBOARD:
        for name, matched in parse_selectors(query):
            named = matched | parse_grouping(query) - {"uuid"}
            assert named <= carried[name] | {"instance"}, query


def test_dashboards_and_alerts_work(mock_nvml: MockNvml, tmp_path: Path) -> None:
    """Each query of dashboard 12239 and each condition of public rules returns series in a real Prometheus."""
    config = tmp_path / "config.yaml"
    config.write_text("compat: dcgm\npoll: {interval: 500ms, slow_interval: 1s}\n")
    daemon = Daemon(tmp_path, "--config", str(config), env=mock_nvml.env(gpus=GPUS))
    with end_processes(daemon):
        prometheus = Prometheus(tmp_path / "prometheus", f"127.0.0.1:{daemon.port}")
        with end_processes(prometheus):
            silent = [*DASHBOARD, *map(without_threshold, ALERTS)]

            def answered() -> bool:
                silent[:] = [query for query in silent if not prometheus.query(query)]
                return not silent

            wait_until(lambda: prometheus.query("rate(DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION[5m])"), "two scrapes")
            with contextlib.suppress(AssertionError):
                wait_until(answered, "a result of each query", 20)
            assert silent == []
            assert len(prometheus.query(DASHBOARD[-2])) == GPUS
            mock_nvml.xid(3, 79)
            (firing,) = wait_until(lambda: prometheus.query("DCGM_FI_DEV_XID_ERRORS > 0"), "the XID").items()
            assert dict(firing[0]).items() >= {"gpu": "3", "err_code": "79"}.items()
            assert firing[1] == 79
