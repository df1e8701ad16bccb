"""Memory of the framework's allocators on a run's devices, as of the last sample."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from time import monotonic

from gpuwarden.client.frameworks import Framework
from gpuwarden.protocol.messages import DeviceMemory
from gpuwarden.protocol.validators import MAX_DEVICES


class AllocatorMemory:
    """Allocator figures of the watched devices; a device whose allocator has none is absent."""

    def __init__(self) -> None:
        self._framework: Framework | None = None
        self._devices: tuple[str, ...] = ()  # to sample
        self._latest: dict[str, DeviceMemory] = {}
        self._sampled_at = 0.0  # monotonic

    def watch(self, framework: Framework, devices: Iterable[str]) -> None:
        """Watch these devices in place of the last ones; peaks are kept."""
        self._framework = framework
        self._devices = tuple(devices)
        self._latest = {device: last for device, last in self._latest.items() if device in self._devices}
        self.sample()

    def sample(self) -> None:
        """Read the allocators, some µs a device; a device that fails is not read again."""
        if self._framework is None:
            return
        self._sampled_at = monotonic()
        for device in self._devices:
            last = self._latest.get(device)
            try:
                now = self._framework.read_memory(device)
            except Exception:  # noqa: BLE001 - no statistics, by framework, version and allocator
                self._devices = tuple(each for each in self._devices if each != device)
                now = None
            if now is None:  # no statistics, or not used yet
                self._latest.pop(device, None)
                continue
            if last and last.peak > now.peak:  # the user has reset the allocator's peak
                now = replace(now, peak=last.peak)
            self._latest[device] = now

    def sample_at_exit(self) -> float | None:
        """Sample as the interpreter exits; return the age of the figures in seconds, None if they are new.

        The figures stay old for JAX, which has ended its devices by then.
        """
        if self._framework is not None and self._framework.name == "jax":
            return monotonic() - self._sampled_at
        self.sample()
        return None

    def latest(self) -> dict[str, DeviceMemory]:
        """Return each device's latest figures."""
        return dict(self._latest)


def add_named_devices(found: Mapping[str, str | None], named: Mapping[str, str]) -> dict[str, str | None]:
    """Return the devices to watch: those `found` and those the user `named`, each with the UUID of its GPU."""
    return dict(list({**found, **named}.items())[:MAX_DEVICES])
