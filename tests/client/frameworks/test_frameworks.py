"""The frameworks' adapters, with stand-ins for the figures that only a GPU has."""

from __future__ import annotations

import sys
from threading import Lock
from types import SimpleNamespace
from typing import Any

import pytest

from gpuwarden.client import frameworks
from gpuwarden.client.frameworks import cuda_devices
from gpuwarden.client.frameworks.allocator_memory import AllocatorMemory
from gpuwarden.client.frameworks.detect import FrameworkSearch
from gpuwarden.client.frameworks.jax import Jax
from gpuwarden.client.frameworks.tensorflow import TensorFlow
from gpuwarden.client.frameworks.torch import Torch
from gpuwarden.protocol.messages import DeviceMemory


@pytest.fixture(autouse=True)
def none_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the frameworks that other tests have imported into this process."""
    for module in (*frameworks.FRAMEWORK_NAMES, "torch.cuda", "jax._src.xla_bridge", "tensorflow.python.eager.context"):
        monkeypatch.delitem(sys.modules, module, raising=False)


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> list[str] | None:
    """Return the UUIDs that CUDA reports, to be filled by the test."""
    found: list[str] = []
    monkeypatch.setattr(cuda_devices, "read_uuids", lambda: tuple(found) or None)
    return found


class FakeCuda:
    """torch.cuda of a process with two GPUs; the figures are the test's."""

    def __init__(self) -> None:
        self.initialized = True
        self.fractions = [1.0, 0.25]
        self.bytes = [[0, 0, 0, 0], [10, 20, 30, 40]]  # allocated now and at most, reserved now and at most

    def is_initialized(self) -> bool:
        """As in torch."""
        return self.initialized

    def device_count(self) -> int:
        """As in torch."""
        assert self.initialized, "torch would set CUDA up"
        return 2

    def memory_stats_as_nested_dict(self, index: int) -> dict[str, Any]:
        """As in torch."""
        now, most, held, most_held = self.bytes[index]
        return {
            "allocated_bytes": {"all": {"current": now, "peak": most}, "small_pool": {"current": -1, "peak": -1}},
            "reserved_bytes": {"all": {"current": held, "peak": most_held}},
        }

    def get_per_process_memory_fraction(self, index: int) -> float:
        """As in torch."""
        return self.fractions[index]

    def get_device_properties(self, index: int) -> SimpleNamespace:
        """As in torch."""
        return SimpleNamespace(total_memory=1000, uuid=f"{index:08}-0000-0000-0000-000000000000")


@pytest.fixture
def fake_torch(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """Return a stand-in for torch."""
    made = FakeCuda()
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(__version__="2.9", cuda=made))
    monkeypatch.setitem(sys.modules, "torch.cuda", made)
    return made


def test_torch_figures(fake_torch: FakeCuda, known: list[str]) -> None:
    """Torch reports allocated and reserved bytes, the limit if one is set, and nothing for a GPU not used."""
    torch = Torch()
    assert torch.read_memory("GPU:1") == DeviceMemory(current=10, peak=20, limit=250, reserved=30)
    assert torch.read_memory("GPU:0") is None
    fake_torch.bytes[0] = [1, 1, 2, 2]
    assert torch.read_memory("GPU:0") == DeviceMemory(current=1, peak=1, limit=None, reserved=2)
    fake_torch.bytes[0] = [0, 0, 0, 0]  # emptied, and the peak reset
    assert torch.read_memory("GPU:0") == DeviceMemory(current=0, peak=0, limit=None, reserved=0)


def test_torch_device_used_later(fake_torch: FakeCuda, known: list[str]) -> None:
    """A GPU that the process uses only later is reported from then on."""
    memory = AllocatorMemory()
    memory.watch(Torch(), Torch().list_devices())
    assert set(memory.latest()) == {"GPU:1"}
    fake_torch.bytes[0] = [1, 1, 2, 2]
    memory.sample()
    assert set(memory.latest()) == {"GPU:0", "GPU:1"}


def test_torch_uuids(fake_torch: FakeCuda, known: list[str]) -> None:
    """Torch's GPUs have CUDA's UUIDs, or else torch's own."""
    known.extend(["MIG-a", "GPU-b"])
    assert Torch().list_devices() == {"GPU:0": "MIG-a", "GPU:1": "GPU-b"}
    known.clear()
    assert list(Torch().list_devices().values()) == [f"GPU-{n:08}-0000-0000-0000-000000000000" for n in range(2)]


def test_torch_old(fake_torch: FakeCuda, known: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """An older torch reports neither UUID nor limit."""
    monkeypatch.delattr(FakeCuda, "get_per_process_memory_fraction")
    monkeypatch.setattr(FakeCuda, "get_device_properties", lambda *_: SimpleNamespace(total_memory=1000))
    assert Torch().list_devices() == {"GPU:0": None, "GPU:1": None}
    assert Torch().read_memory("GPU:1") == DeviceMemory(current=10, peak=20, limit=None, reserved=30)


def test_torch_not_set_up(fake_torch: FakeCuda) -> None:
    """A torch that has not set up CUDA is not read for devices."""
    fake_torch.initialized = False
    assert Torch().list_devices() == {}
    assert list(frameworks.list_running_frameworks()) == []


def gpu(index: int, statistics: dict[str, int] | None, hardware: int | None = None) -> SimpleNamespace:
    """Make a device of JAX's."""
    hardware = index if hardware is None else hardware
    return SimpleNamespace(id=index, local_hardware_id=hardware, platform="gpu", memory_stats=lambda: statistics)


BFC = {  # the keys of a real answer of XLA's best-fit allocator
    "num_allocs": 7,
    "bytes_in_use": 10,
    "peak_bytes_in_use": 20,
    "largest_alloc_size": 5,
    "bytes_limit": 100,
    "bytes_reserved": 0,
    "peak_bytes_reserved": 0,
    "largest_free_block_bytes": 0,
    "pool_bytes": 100,
    "peak_pool_bytes": 100,
}


@pytest.fixture
def fake_jax(monkeypatch: pytest.MonkeyPatch) -> list[SimpleNamespace]:
    """Return a stand-in for JAX; the devices are the test's."""
    devices: list[SimpleNamespace] = []
    monkeypatch.setitem(sys.modules, "jax", SimpleNamespace(__version__="0.9", local_devices=lambda: devices))
    return devices


def test_jax_figures(fake_jax: list[SimpleNamespace], known: list[str]) -> None:
    """JAX reports bytes in use, its limit, and its pool, which has one of two names by allocator."""
    other = {"bytes_in_use": 1, "peak_bytes_in_use": 2, "bytes_reserved": 64, "bytes_limit": 0}
    fake_jax.extend([gpu(0, BFC), gpu(1, other), gpu(2, None)])
    jax = Jax()
    assert jax.read_memory("GPU:0") == DeviceMemory(current=10, peak=20, limit=100, reserved=100)
    assert jax.read_memory("GPU:1") == DeviceMemory(current=1, peak=2, limit=None, reserved=64)
    with pytest.raises(LookupError):
        jax.read_memory("GPU:2")


def test_jax_devices(fake_jax: list[SimpleNamespace], known: list[str]) -> None:
    """A GPU of JAX's goes by CUDA's index, whatever JAX counts among all processes; a CPU is none."""
    known.extend(["GPU-a", "GPU-b"])
    cpu = SimpleNamespace(id=0, local_hardware_id=None, platform="cpu", memory_stats=lambda: None)
    fake_jax.extend([gpu(5, BFC, hardware=1), gpu(4, BFC, hardware=0), gpu(6, BFC, hardware=2), cpu])
    assert Jax().list_devices() == {"GPU:1": "GPU-b", "GPU:0": "GPU-a", "GPU:2": None}


def test_tensorflow_uuids(monkeypatch: pytest.MonkeyPatch, known: list[str]) -> None:
    """A visible GPU of TensorFlow's has the UUID of the CUDA device whose index its physical name bears."""
    known.extend(["GPU-a", "GPU-b", "GPU-c"])
    gpus = [SimpleNamespace(name=f"/physical_device:GPU:{index}") for index in (2, 0)]
    config = SimpleNamespace(
        get_visible_devices=lambda *_: gpus,
        get_logical_device_configuration=lambda _: None,
        experimental=SimpleNamespace(get_memory_info=None),
    )
    monkeypatch.setitem(sys.modules, "tensorflow", SimpleNamespace(config=config))
    assert TensorFlow().list_devices() == {"GPU:2": "GPU-c", "GPU:0": "GPU-a"}


@pytest.fixture
def bridge(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Return a stand-in for the module in which JAX keeps its backends."""
    made = SimpleNamespace(_backends={}, _backend_lock=Lock())
    monkeypatch.setitem(sys.modules, "jax._src.xla_bridge", made)
    return made


def test_jax_runs(bridge: SimpleNamespace) -> None:
    """JAX counts once it has made its backends, not while another thread makes them."""
    assert list(frameworks.list_running_frameworks()) == []
    bridge._backends["cpu"] = object()
    assert list(frameworks.list_running_frameworks()) == ["jax"]
    with bridge._backend_lock:
        assert list(frameworks.list_running_frameworks()) == []


@pytest.mark.usefixtures("fake_torch", "known")
def test_search_prefers_devices(bridge: SimpleNamespace, fake_jax: list[SimpleNamespace], fake_torch: FakeCuda) -> None:
    """The framework with GPUs is the one that computes, even if another one was there first."""
    fake_jax.append(SimpleNamespace(id=0, local_hardware_id=0, platform="cpu", memory_stats=lambda: None))
    fake_torch.initialized = False
    bridge._backends["cpu"] = object()
    memory, search = AllocatorMemory(), FrameworkSearch(None, {})
    assert search.search(memory, stepped=True)
    assert (search.framework, dict(search.devices)) == ("jax 0.9", {})
    assert not search.search(memory, stepped=True)
    fake_torch.initialized = True
    assert search.search(memory, stepped=True)
    assert (search.framework, set(search.devices), set(memory.latest())) == (
        "torch 2.9",
        {"GPU:0", "GPU:1"},
        {"GPU:1"},
    )
    fake_torch.initialized = False
    assert not search.search(memory, stepped=True)


@pytest.mark.usefixtures("fake_torch", "known")
def test_search_wanted(bridge: SimpleNamespace, fake_jax: list[SimpleNamespace]) -> None:
    """A framework that the user names is the only one read."""
    fake_jax.append(gpu(0, BFC))
    search = FrameworkSearch("jax", {"GPU:0": "GPU-a"})
    memory = AllocatorMemory()
    assert (search.framework, dict(search.devices)) == ("jax 0.9", {"GPU:0": "GPU-a"})
    assert not search.search(memory, stepped=True)
    bridge._backends["cuda"] = object()
    search.search(memory, stepped=True)
    assert (search.framework, dict(search.devices)) == ("jax 0.9", {"GPU:0": "GPU-a"})
    assert memory.latest()["GPU:0"].reserved == 100


@pytest.mark.usefixtures("fake_torch")
def test_imported(fake_jax: list[SimpleNamespace]) -> None:
    """If several frameworks are imported and none is set up, none is named."""
    assert frameworks.list_imported_frameworks() == ["torch", "jax"]
    assert FrameworkSearch(None, {}).framework.startswith("python 3.")
    assert frameworks.make_adapter("numpy") is None
    assert frameworks.make_adapter("tensorflow") is None
