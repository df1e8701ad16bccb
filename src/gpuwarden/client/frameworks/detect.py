"""Search for the framework that a process computes with, and for its devices."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping

from gpuwarden.client import frameworks
from gpuwarden.client.frameworks.allocator_memory import AllocatorMemory, add_named_devices
from gpuwarden.client.frameworks.no_gpu import find_no_gpu_reason
from gpuwarden.protocol.messages import NoGpuReason


class FrameworkSearch:
    """Search for a framework with devices, repeated until one is found; after that it costs nothing.

    `wanted` is the framework that the user names. `framework` is its name and version; `devices` are those to report:
    the ones that are found, and the ones that the user `named`. `no_gpu` is why there are none, once a step was made.
    """

    def __init__(self, wanted: str | None, named: Mapping[str, str]) -> None:
        self._wanted = wanted
        self._named = named
        self._tried: set[str] = set()
        self._over = False
        self._explained: str | None = None  # framework whose lack of a GPU is explained
        self.no_gpu: NoGpuReason | None = None
        self.framework = self._name_imported()
        self.devices: Mapping[str, str | None] = add_named_devices({}, named)

    def search(self, memory: AllocatorMemory, *, stepped: bool) -> bool:
        """Search once, in some µs, and make `memory` watch the result; return whether it has changed.

        `stepped`: the program has computed something, so a framework without a GPU will use none.
        """
        before = self.framework, self.devices, self.no_gpu
        if not self._over:
            self._add_running_frameworks(memory)
        name = self.framework.partition(" ")[0]
        if self.devices:
            self.no_gpu = None
        # Only torch is asked before it has set up devices, as that is safe.
        elif stepped and self._explained != self.framework and name in ("torch", *self._tried):
            self._explained = self.framework
            self.no_gpu = find_no_gpu_reason(name)
        return before != (self.framework, self.devices, self.no_gpu)

    def _add_running_frameworks(self, memory: AllocatorMemory) -> None:
        for name in frameworks.list_running_frameworks():
            if not self._over and name not in self._tried and self._wanted in (None, name):
                self._add_framework(name, memory)
        if not self._tried:
            self.framework = self._name_imported()

    def _add_framework(self, name: str, memory: AllocatorMemory) -> None:
        self._tried.add(name)
        framework = frameworks.make_adapter(name)
        if framework is None:
            return
        devices = framework.list_devices()
        self._over = bool(devices) or name == self._wanted
        if self._over or len(self._tried) == 1:  # otherwise keep the first one found, without devices
            self.framework = f"{framework.name} {framework.version}"
            self.devices = add_named_devices(devices, self._named)
            memory.watch(framework, self.devices)

    def _name_imported(self) -> str:
        """Return the name of the framework that will compute, as far as the imports show."""
        names = frameworks.list_imported_frameworks() if self._wanted is None else [self._wanted]
        if len(names) != 1:
            return f"python {platform.python_version()}"
        return f"{names[0]} {getattr(sys.modules.get(names[0]), '__version__', '')}".strip()
