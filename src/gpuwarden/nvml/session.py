"""Session with the driver: initialized once, again after the driver went away, and closed on request."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from gpuwarden.nvml.interface import Nvml
from gpuwarden.nvml.return_codes import DRIVER_GONE, LIBRARY_MISMATCH, NVMLError, code_of, if_supported
from gpuwarden.nvml.troubleshooting import hidden_gpus

RETRY_SECONDS = 5.0  # between attempts to initialize a driver that is not there


@dataclass(frozen=True, slots=True)
class DriverVersions:
    """Versions of the driver and its CUDA; `cuda_version` is empty if unknown."""

    version: str
    cuda_version: str


class HiddenGpusError(Exception):
    """NVML does not list the machine's GPUs; the text says why."""


class Session:
    """Session with NVML. It counts initializations, as NVML does.

    Its methods block, and exclude each other: an initialization must not overlap a shutdown that hangs.
    """

    def __init__(self, nvml: Nvml) -> None:
        self._nvml = nvml
        self._turn = threading.Lock()
        self._initialized = 0
        self._refused: Exception | None = None
        self._retry_at = 0.0
        self.driver: DriverVersions | None = None
        self.open = False
        self._matched = False  # whether the driver ever gave another answer than a version mismatch
        self.outdated = False  # whether the driver was updated since: only a new process can load its library
        self.number = 0  # of this session: handles of another session are invalid

    def count(self) -> int:
        """Initialize if need be, and count the GPUs. Raises NVMLError or HiddenGpusError."""
        with self._turn:
            try:
                if not self.open:
                    self._initialize()
                count = self._nvml.nvmlDeviceGetCount()
            except NVMLError as error:
                if code_of(error) in DRIVER_GONE:
                    self.open = False
                raise
        if hidden := hidden_gpus(count):
            raise HiddenGpusError(hidden)
        return count

    def close(self) -> None:
        """Shut NVML down, which closes all devices. Raises NVMLError if it fails."""
        with self._turn:
            self._close()

    def _close(self) -> None:
        self.open = False
        self._refused = None
        before = self._initialized
        while self._initialized:
            try:
                self._nvml.nvmlShutdown()
            except NVMLError as error:
                if code_of(error) not in DRIVER_GONE:
                    raise
                if self._initialized < before:
                    self._initialized = 0  # NVML dropped earlier ones: nothing is left to shut down
                return  # otherwise this may be temporary, and is tried again next time
            self._initialized -= 1

    def _initialize(self) -> None:
        if self._refused and time.monotonic() < self._retry_at:
            raise self._refused
        try:
            self._close()  # while an earlier initialization counts, another one would have no effect
            self._nvml.nvmlInit()
            self._initialized += 1
            cuda = if_supported(self._nvml.nvmlSystemGetCudaDriverVersion_v2)
            version = self._nvml.nvmlSystemGetDriverVersion()
        except NVMLError as error:
            self._refused, self._retry_at = error, time.monotonic() + RETRY_SECONDS
            mismatch = code_of(error) == LIBRARY_MISMATCH
            self._matched = self._matched or not mismatch
            # A process with the mismatch from its start has the new library: a restart would not help.
            self.outdated = mismatch and self._matched
            raise
        self._matched = True
        self.driver = DriverVersions(version, "" if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}")
        self.number += 1
        self.open = True
