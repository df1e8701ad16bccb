"""Search for the framework that a process computes with, and for its devices."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping

from gpuwarden.client import frameworks
from gpuwarden.client.frameworks.allocator_memory import AllocatorMemory, add_named_devices


class FrameworkSearch:
    """Search for a framework with devices, repeated until one is found; after that it costs nothing.

    `wanted` is the framework that the user names. `framework` is its name and version; `devices` are those to report:
    the ones that are found, and the ones that the user `named`.
    """

    def __init__(self, wanted: str | None, named: Mapping[str, str]) -> None:
        self._wanted = wanted
        self._named = named
        self._tried: set[str] = set()
        self._over = False
        self.framework = self._name_imported()
        self.devices: Mapping[str, str | None] = add_named_devices({}, named)

    def update(self, memory: AllocatorMemory) -> bool:
        """Search once, in some µs, and make `memory` watch the result; return whether it has changed."""
        if self._over:
            return False
        before = self.framework, self.devices
        for name in frameworks.list_running_frameworks():
            if not self._over and name not in self._tried and self._wanted in (None, name):
                self._add_framework(name, memory)
        if not self._tried:
            self.framework = self._name_imported()
        return before != (self.framework, self.devices)

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
