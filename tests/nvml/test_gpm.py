"""GPM: ratios between two samples, absent without a value; one thread per sample."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import cast

import pynvml
import pytest
from polled_driver import SLOW, run_polled_driver
from simulated_box import Clock

from gpuwarden.capture.nvml_stand_ins import PlainGpmRequest
from gpuwarden.nvml.constants import GPM_DRAM_ACTIVE, GPM_PCIE, GPM_SM_ACTIVE
from gpuwarden.nvml.gpm import MIN_SAMPLE_SECONDS, Gpm
from gpuwarden.nvml.interface import GpmSample, Handle, Nvml
from gpuwarden.nvml.return_codes import NVMLError, nvml_error
from mock_nvml import MockNvml

HANDLE = cast("Handle", "the GPU")
SM = "gpu_sm_active_ratio"
ACTIVE = {
    SM,
    "gpu_dram_active_ratio",
    "gpu_pipe_active_ratio tensor",
    "gpu_tensor_pipe_active_ratio hmma",
    "gpu_pcie_mean_throughput_bytes_per_second receive",
}


class Driver:
    """GPM of a fake driver: samples are lists that record the requests."""

    def __init__(self) -> None:
        self.values: dict[int, float] = {}
        self.codes: dict[int, int] = {}
        self.fails: int | None = None
        self.supported = 1
        self.filled: list[int] = []  # index of the buffer, per sample
        self.live: list[GpmSample] = []
        self.compared: list[tuple[object, object]] = []
        self.before_filling: Callable[[], None] = lambda: None
        self.c_nvmlGpmMetricsGet_t = PlainGpmRequest

    def nvmlGpmQueryDeviceSupport(self, _handle: Handle) -> object:  # noqa: N802
        """Return whether GPM is supported."""
        return pynvml.c_nvmlGpmSupport_t(1, self.supported)

    def nvmlGpmSampleAlloc(self) -> GpmSample:  # noqa: N802
        """Allocate a buffer."""
        self.live.append(cast("GpmSample", []))
        return self.live[-1]

    def nvmlGpmSampleFree(self, sample: GpmSample) -> None:  # noqa: N802
        """Free a buffer; fail if it was not allocated."""
        self.live.remove(sample)

    def nvmlGpmSampleGet(self, _handle: Handle, sample: GpmSample) -> None:  # noqa: N802
        """Fill a buffer."""
        self.before_filling()
        if self.fails is not None:
            raise nvml_error(self.fails)
        self.filled.append(next(number for number, each in enumerate(self.live) if each is sample))

    def nvmlGpmMetricsGet(self, request: PlainGpmRequest) -> None:  # noqa: N802
        """Return the code and value of each metric."""
        self.compared.append((request.sample1, request.sample2))
        for metric in request.wanted():
            metric.nvmlReturn = self.codes.get(metric.metricId, 0)
            metric.value = self.values.get(metric.metricId, 0.0)


@pytest.fixture
def driver() -> Driver:
    """Return a fake driver."""
    return Driver()


class Sampler:
    """GPM of one GPU on a separate clock."""

    def __init__(self, driver: Driver) -> None:
        self.clock = Clock()
        self.gpm = Gpm(cast("Nvml", driver), self.clock)

    def read(self, metric: int = GPM_SM_ACTIVE, later: float = SLOW) -> float | None:
        """Read one metric in a new reading."""
        self.clock.sleep(later)
        self.gpm.begin()
        return self.gpm.read_metric(HANDLE, metric)


@pytest.fixture
def sampler(driver: Driver) -> Sampler:
    """Return the GPM of a GPU on the fake driver."""
    return Sampler(driver)


@pytest.mark.parametrize(
    ("percent", "ratio"),
    [(0.0, 0.0), (37.5, 0.375), (100.0, 1.0), (100.4, 1.0), (101.5, 1.015), (-1.0, -0.01), (math.inf, math.inf)],
)
def test_percent_becomes_a_ratio(driver: Driver, sampler: Sampler, percent: float, ratio: float) -> None:
    """Percent becomes a ratio; more than 100 % by rounding is 1, and the gate refuses what is impossible."""
    driver.values[GPM_SM_ACTIVE] = percent
    assert sampler.read() is None  # one sample gives no value
    assert sampler.read() == ratio


@pytest.mark.parametrize(
    ("mebibytes", "traffic"),
    [(0.0, 0.0), (1.5, 1.5 * 2**20), (-1.0, -(2**20)), (math.inf, math.inf)],
)
def test_traffic_is_in_bytes(driver: Driver, sampler: Sampler, mebibytes: float, traffic: float) -> None:
    """MiB become bytes."""
    driver.values[GPM_PCIE["transmit"]] = mebibytes
    sampler.read()
    assert sampler.read(GPM_PCIE["transmit"]) == traffic


def test_metric_that_is_not_supported_is_absent(driver: Driver, sampler: Sampler) -> None:
    """An unsupported metric is absent, others stay; an error of one metric is reported in each reading."""
    driver.values = {GPM_SM_ACTIVE: 10.0, GPM_DRAM_ACTIVE: 20.0}
    driver.codes[GPM_SM_ACTIVE] = pynvml.NVML_ERROR_NOT_SUPPORTED
    sampler.read()
    assert sampler.read() is None
    assert sampler.gpm.read_metric(HANDLE, GPM_DRAM_ACTIVE) == 0.2
    driver.codes[GPM_SM_ACTIVE] = pynvml.NVML_ERROR_UNKNOWN
    for _ in range(2):
        with pytest.raises(NVMLError):
            sampler.read()
        assert sampler.gpm.read_metric(HANDLE, GPM_DRAM_ACTIVE) == 0.2


def test_one_sample_per_reading_and_two_buffers_in_total(driver: Driver, sampler: Sampler) -> None:
    """A reading takes one sample for all rows, into the older of two buffers, and compares once."""
    for _ in range(4):
        sampler.read()
        sampler.gpm.read_metric(HANDLE, GPM_DRAM_ACTIVE)
    assert driver.filled == [0, 1, 0, 1]
    assert len(driver.compared) == 3
    assert all(newer is driver.live[number] for number, (_, newer) in zip((1, 0, 1), driver.compared, strict=True))


def test_samples_that_are_too_close_are_not_taken(driver: Driver, sampler: Sampler) -> None:
    """Below the minimum interval the last two samples are compared again, with the same result."""
    driver.values[GPM_SM_ACTIVE] = 50.0
    sampler.read()
    assert sampler.read(later=MIN_SAMPLE_SECONDS / 2) is None
    assert sampler.read(later=MIN_SAMPLE_SECONDS) == 0.5
    assert sampler.read(later=MIN_SAMPLE_SECONDS / 2) == 0.5
    assert driver.filled == [0, 1]


def test_failed_sample_is_not_compared_with(driver: Driver, sampler: Sampler) -> None:
    """The buffer of a failed call is not used; its error is reported once; two samples later values are back."""
    sampler.read()
    sampler.read()
    driver.fails = pynvml.NVML_ERROR_UNKNOWN
    with pytest.raises(NVMLError):
        sampler.read()
    assert sampler.gpm.read_metric(HANDLE, GPM_DRAM_ACTIVE) is None
    driver.fails = None
    assert sampler.read() is None
    assert sampler.read() == 0.0
    assert len(driver.live) == 2


def test_unsupported_gpu_is_not_queried_again(driver: Driver, sampler: Sampler) -> None:
    """A GPU without GPM gets no buffers; one that refuses the sample is not sampled again until `relearn`."""
    driver.supported = 0
    assert sampler.read() is None
    assert driver.live == []
    driver.supported, driver.fails = 1, pynvml.NVML_ERROR_NOT_SUPPORTED
    sampler.gpm.relearn()
    assert sampler.read() is None
    driver.fails = None
    assert sampler.read() is None
    assert driver.filled == []
    sampler.gpm.relearn()
    sampler.read()
    assert sampler.read() == 0.0


def test_release_frees_all_buffers(driver: Driver, sampler: Sampler) -> None:
    """All buffers are freed; the next readings start with new ones."""
    sampler.read()
    sampler.read()
    assert sampler.gpm.release()
    assert driver.live == []
    assert sampler.gpm.release()
    assert sampler.read() is None
    assert sampler.read() == 0.0
    assert len(driver.live) == 2


def test_samples_in_use_are_not_released(driver: Driver, sampler: Sampler) -> None:
    """While a call hangs, no other thread uses its samples or waits for them."""
    sampler.read()
    began, goes_on = threading.Event(), threading.Event()

    def hang() -> None:
        began.set()
        goes_on.wait()

    driver.before_filling = hang
    reader = threading.Thread(target=sampler.read)
    reader.start()
    began.wait()
    assert not sampler.gpm.release()
    assert len(driver.live) == 2
    goes_on.set()
    reader.join()
    assert driver.filled == [0, 1]
    assert sampler.gpm.release()
    assert driver.live == []


class TestRealBinding:
    """GPM through nvidia-ml-py on the mock library, which ends the process if two threads use one sample."""

    def test_data_centre_gpu(self, mock_nvml: MockNvml) -> None:
        """Ratios are there from the second slow reading on."""
        mock_nvml.set(1, "util", 40)
        with run_polled_driver(mock_nvml.env(gpus=2, frozen=1)) as driver:
            assert not ACTIVE & driver.poll()[1].readings.keys()
            for _ in range(3):
                idle, busy = driver.poll(SLOW)
                assert busy.readings.keys() >= ACTIVE
                assert (idle.readings[SM], busy.readings[SM]) == (0.5, 0.4)
                assert busy.readings["gpu_pipe_active_ratio tensor"] == 0.16
            assert driver.poll(SLOW / 10)[1].readings[SM] == 0.4  # from the last slow reading
        assert mock_nvml.calls()["nvmlGpmSampleAlloc"] == 4
        assert mock_nvml.calls()["nvmlGpmSampleGet"] == 8

    def test_consumer_card(self, mock_nvml: MockNvml) -> None:
        """A card without GPM has no such reading, no error, and no call except the query for support."""
        with run_polled_driver(mock_nvml.env(gpus=1, model="rtx4090")) as driver:
            for _ in range(3):
                (gpu,) = driver.poll(SLOW)
                assert not [name for name in gpu.readings if "active_ratio" in name or "occupancy" in name]
                assert gpu.errors == {}
        assert {name for name in mock_nvml.calls() if "Gpm" in name} == {"nvmlGpmQueryDeviceSupport"}

    def test_switched_off(self, mock_nvml: MockNvml) -> None:
        """Without gpus.gpm there are no GPM calls, even on a divided GPU."""
        mock_nvml.mig(1, "3g.40gb")
        with run_polled_driver(mock_nvml.env(gpus=2), "nothing") as driver:
            for _ in range(2):
                gpus = driver.poll(SLOW)
                assert not [name for gpu in gpus for name in gpu.readings if "active_ratio" in name]
                assert len(gpus[1].mig) == 1
        assert not [name for name in mock_nvml.calls() if "Gpm" in name]

    def test_hang_affects_its_gpu_only(self, mock_nvml: MockNvml) -> None:
        """A sample that hangs takes its GPU down, and is not repeated; the others continue, and it comes back."""
        with run_polled_driver(mock_nvml.env(gpus=2, frozen=1)) as driver:
            driver.poll()
            driver.poll(SLOW)
            mock_nvml.hang(0, "nvmlGpmSampleGet")
            before = mock_nvml.calls()
            for _ in range(4):
                hung, other = driver.poll(SLOW)
                assert hung.fault == "timeout"
                assert hung.readings == {}
                assert other.readings[SM] == 0.5
            after = mock_nvml.calls()
            assert after["nvmlGpmSampleAlloc"] == before["nvmlGpmSampleAlloc"] == 4
            assert "nvmlGpmSampleFree" not in after
            assert after["nvmlGpmSampleGet"] - before["nvmlGpmSampleGet"] == 1 + 4  # the one that hangs
            mock_nvml.clear()
            while driver.poll(0.0)[0].fault:
                pass
            assert driver.poll(SLOW)[0].readings[SM] == 0.5

    def test_driver_that_is_reloaded(self, mock_nvml: MockNvml) -> None:
        """Earlier samples are freed and not used; values are back after two readings."""
        with run_polled_driver(mock_nvml.env(gpus=2, frozen=1)) as driver:
            driver.poll()
            assert driver.poll(SLOW)[0].readings[SM] == 0.5
            mock_nvml.error("*", "*", "UNINITIALIZED")
            assert driver.poll(SLOW)[0].fault == "uninitialized"
            mock_nvml.clear()
            first, second = driver.poll(SLOW), driver.poll(SLOW)
            assert [gpu.fault for gpu in first] == [None, None]
            assert SM not in first[0].readings
            assert [gpu.readings[SM] for gpu in second] == [0.5, 0.5]
        calls = mock_nvml.calls()
        assert calls["nvmlGpmSampleAlloc"] - calls["nvmlGpmSampleFree"] == 4
