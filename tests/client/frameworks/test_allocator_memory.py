"""A device's memory as TensorFlow reports it."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from gpuwarden.client.frameworks.allocator_memory import AllocatorMemory, add_named_devices
from gpuwarden.client.frameworks.tensorflow import TensorFlow, list_physical_devices
from gpuwarden.protocol.messages import DeviceMemory


@pytest.fixture
def tf(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a stand-in for TensorFlow: GPUs 1 and 2 are visible, GPU 2 split in two; `info` has their memory."""
    info = {f"GPU:{index}": {"current": 10 + index, "peak": 20 + index} for index in range(3)}
    gpus = [SimpleNamespace(name=f"/physical_device:GPU:{index}") for index in (1, 2)]
    cuts = {gpus[1].name: [SimpleNamespace(memory_limit=1024)] * 2}
    config = SimpleNamespace(
        get_visible_devices=lambda *_: gpus,
        get_logical_device_configuration=lambda device: cuts.get(device.name),
        experimental=SimpleNamespace(get_memory_info=lambda name: info[name]),
    )
    tf = SimpleNamespace(config=config, info=info)
    monkeypatch.setitem(sys.modules, "tensorflow", tf)
    return tf


def test_physical_names(tf: Any) -> None:
    """Devices are named by the physical name, since a logical index does not identify the GPU."""
    assert list_physical_devices("GPU") == {"GPU:1": ("GPU:0",), "GPU:2": ("GPU:1", "GPU:2")}


def test_reading(tf: Any) -> None:
    """A GPU that is split reads as the sum of its parts, with a limit if one is set."""
    memory = AllocatorMemory()
    memory.watch(TensorFlow(), TensorFlow().list_devices())
    assert memory.latest() == {"GPU:1": DeviceMemory(10, 20), "GPU:2": DeviceMemory(23, 43, 2 << 30)}


def test_named(tf: Any) -> None:
    """A device that the user names is watched in addition to the GPUs, with the GPU it stands for."""
    found = TensorFlow().list_devices()
    assert add_named_devices(found, {"CPU:0": "GPU-a", "GPU:1": "GPU-b"}) == {
        "GPU:1": "GPU-b",
        "GPU:2": None,
        "CPU:0": "GPU-a",
    }


def test_no_statistics(tf: Any) -> None:
    """A device without statistics has no reading, and costs the others none."""
    tf.info["GPU:0"] = {}
    memory = AllocatorMemory()
    memory.watch(TensorFlow(), add_named_devices(TensorFlow().list_devices(), {"CPU:0": "GPU-a"}))
    assert set(memory.latest()) == {"GPU:2"}


def test_peak_outlives_reset(tf: Any) -> None:
    """If the user resets a peak, the highest one is kept, also from one fit to the next."""
    memory = AllocatorMemory()
    memory.watch(TensorFlow(), ["GPU:1"])
    tf.info["GPU:0"]["peak"] = 5
    memory.sample()
    memory.watch(TensorFlow(), ["GPU:1"])
    assert memory.latest()["GPU:1"].peak == 20


@pytest.mark.parametrize(
    ("environment", "limit"),
    [
        ({}, None),
        ({"TF_CPU_BFC_MEM_LIMIT_IN_MB": "512"}, None),
        ({"TF_CPU_ALLOCATOR_USE_BFC": "1", "TF_CPU_BFC_MEM_LIMIT_IN_MB": "512"}, 512 << 20),
        ({"TF_CPU_ALLOCATOR_USE_BFC": "True"}, 64 << 30),
        ({"TF_CPU_ALLOCATOR_USE_BFC": "1", "TF_CPU_BFC_MEM_LIMIT_IN_MB": "much"}, None),
    ],
)
def test_cpu_limit(tf: Any, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], limit: int | None) -> None:
    """A CPU has the limit that TensorFlow's own variables set."""
    for variable in ("TF_CPU_ALLOCATOR_USE_BFC", "TF_CPU_BFC_MEM_LIMIT_IN_MB"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    tf.info["CPU:0"] = {"current": 1, "peak": 2}
    memory = AllocatorMemory()
    memory.watch(TensorFlow(), ["CPU:0"])
    assert memory.latest()["CPU:0"].limit == limit
