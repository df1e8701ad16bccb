"""Answer expressions over nvidia-ml-py, one a line, with JSON: the process that a test of the mock asks.

A process of its own, for a process cannot unload the library that it once loaded.
"""

import json
import sys
import time
from typing import Any

import pynvml
from pynvml import *  # noqa: F403 - the names that the tests' expressions use


def gpu(index: int) -> Any:
    """Look up a GPU."""
    return pynvml.nvmlDeviceGetHandleByIndex(index)


def listed(processes: list[Any]) -> dict[int, int | None]:
    """Map pids to bytes of device memory."""
    return {process.pid: process.usedGpuMemory for process in processes}


def fields(index: int, *ids: int) -> list[int]:
    """Read whole-numbered field values."""
    return [value.value.ullVal for value in pynvml.nvmlDeviceGetFieldValues(gpu(index), list(ids))]


def duration(function: Any, *arguments: Any) -> float:
    """Measure one call, in seconds."""
    begun = time.monotonic()
    function(*arguments)
    return time.monotonic() - begun


def gpm(index: int, *metrics: int) -> list[float]:
    """Take two samples and return the metrics between them."""
    request = pynvml.c_nvmlGpmMetricsGet_t()
    request.version = pynvml.NVML_GPM_METRICS_GET_VERSION
    request.numMetrics = len(metrics)
    request.sample1, request.sample2 = (
        pynvml.nvmlGpmSampleGet(gpu(index), pynvml.nvmlGpmSampleAlloc()) for _ in range(2)
    )
    for position, metric in enumerate(metrics):
        request.metrics[position].metricId = metric
    pynvml.nvmlGpmMetricsGet(request)
    return [request.metrics[position].value for position in range(len(metrics))]


for line in sys.stdin:
    try:
        reply = {"value": eval(line)}  # noqa: S307 - the test wrote the line
    except pynvml.NVMLError as error:
        reply = {"error": type(error).__name__.removeprefix("NVMLError_")}
    sys.stdout.write(json.dumps(reply) + "\n")
    sys.stdout.flush()
