"""Adapters for frameworks: their devices, and the memory that their allocators report.

A process computes with the framework that it has imported and set up. Nothing here imports or sets up a framework: that
would allocate memory and freeze options that the program may still set.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from typing import Protocol, cast

from gpuwarden.protocol.messages import DeviceMemory


class Framework(Protocol):
    """Source of device memory: the framework that a run computes with, read in the run's thread, between steps.

    Make an adapter only after the framework has made its devices: listing them earlier would make them and freeze
    their options.
    """

    name: str  # of its module, which is also Keras's name of the backend

    @property
    def version(self) -> str:
        """Version of the framework."""
        return str(sys.modules[self.name].__version__)

    def list_devices(self) -> Mapping[str, str | None]:
        """Return the GPUs that the run may use, "GPU:0" and so on, each with its UUID if known."""

    def read_memory(self, device: str) -> DeviceMemory | None:
        """Read the device's allocator; None while the run has not used the device.

        Raises any exception if it has no statistics.
        """


# By module name. torch and JAX come before TensorFlow, which often only reads their data.
_ADAPTERS = {"torch": "Torch", "jax": "Jax", "tensorflow": "TensorFlow"}
FRAMEWORK_NAMES = tuple(_ADAPTERS)


def list_imported_frameworks() -> list[str]:
    """Return the names of the frameworks that this process has imported."""
    return [name for name in FRAMEWORK_NAMES if getattr(sys.modules.get(name), "__version__", None) is not None]


def list_running_frameworks() -> Iterator[str]:
    """Yield the names of the frameworks that have set up their devices in this process, in some µs."""
    for name, runs in (("torch", _torch_runs), ("jax", _jax_runs), ("tensorflow", _tensorflow_runs)):
        if runs():
            yield name


def make_adapter(name: str) -> Framework | None:
    """Return the adapter for a framework, or Keras backend, that has set up its devices; None for any other."""
    if name not in _ADAPTERS or name not in sys.modules:
        return None
    module = importlib.import_module(f"{__name__}.{name}")
    return cast("Framework", getattr(module, _ADAPTERS[name])())


def _torch_runs() -> bool:
    # The attribute is missing while another thread imports torch.
    is_initialized = getattr(sys.modules.get("torch.cuda"), "is_initialized", None)
    return is_initialized is not None and bool(is_initialized())


def _jax_runs() -> bool:
    # jax.devices() would make the devices and take most of their memory; the bridge's own function waits while another
    # thread makes them.
    bridge = sys.modules.get("jax._src.xla_bridge")
    lock = getattr(bridge, "_backend_lock", None)
    return bool(getattr(bridge, "_backends", None)) and not (lock is not None and lock.locked())


def _tensorflow_runs() -> bool:
    eager = sys.modules.get("tensorflow.python.eager.context")
    return bool(getattr(getattr(eager, "_context", None), "_initialized", False))
