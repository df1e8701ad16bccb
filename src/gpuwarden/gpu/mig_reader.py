"""Reader of a GPU's MIG instances, which searches for them in the slow tier, and at once after a reconfiguration."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from gpuwarden.gpu.metrics import MigReadings
from gpuwarden.gpu.readings.instance import MigDevice
from gpuwarden.gpu.snapshot import MigInstance
from gpuwarden.metrics.model import Metric, Reading
from gpuwarden.metrics.reading_gate import ReadingGate
from gpuwarden.nvml.constants import MEMORY_V2
from gpuwarden.nvml.device import Device
from gpuwarden.nvml.identity import MigIdentity
from gpuwarden.nvml.interface import Handle
from gpuwarden.nvml.return_codes import NO_MIG_DEVICE, NVMLError, code_of, error_name, if_supported

MAX_INSTANCES = 64  # that are looked for on a GPU; today's hardware has 7
RECONFIGURED = "mig_reconfigured"  # counted with the GPU's errors when an instance that had series is gone


class MigReader:
    """Reader of the MIG instances of one GPU. Used by the GPU's one reader.

    Each poll asks a handle for its UUID before its memory: after a reconfiguration a handle may fail, or stand for
    another instance. Then all instances are searched for again within the same reading.
    """

    def __init__(self, gpu: Device, opted_in: frozenset[str], gate: ReadingGate) -> None:
        self._gpu = gpu
        self._gate = gate
        rows = [row for row in MigReadings.rows if not row.opt_in or row.opt_in in opted_in]
        self._poll_rows = [row for row in rows if row.tier == "poll"]
        self._slow_rows = [row for row in rows if row.tier == "slow"]
        self._instances: dict[str, MigDevice] = {}  # of the last reading, by UUID
        self._is_search_incomplete = False  # the last search failed otherwise than by an instance's absence
        self._kept: dict[MigIdentity, Mapping[Metric[Any], Reading]] = {}  # readings of the slow tier

    @property
    def instances_by_ids(self) -> Mapping[tuple[int | None, int | None], MigDevice]:
        """The instances of the last reading by the ids of their GPU and compute instance."""
        return {(i.identity.gpu_instance, i.identity.compute_instance): i for i in self._instances.values()}

    @property
    def has_instances(self) -> bool:
        """True if the last reading found instances, or could not find out."""
        return bool(self._instances) or self._is_search_incomplete

    def clear(self) -> None:
        """Drop all instances: their handles ended with the driver's initialization or the GPU's reset."""
        self._instances = {}

    def read(self, errors: Counter[str], *, slow: bool) -> tuple[MigInstance, ...]:
        """Read what is due; a new instance is read in full. Blocks like the driver; failures go into `errors`."""
        self._update_instances(errors, search=slow)
        kept, self._kept = self._kept, {}
        read: list[MigInstance] = []
        for instance in self._instances.values():
            slowly = None if slow else kept.get(instance.identity)
            if slowly is None:
                slowly = self._read_rows(self._slow_rows, instance, errors)
            self._kept[instance.identity] = slowly
            read.append(
                MigInstance(instance.identity, {**slowly, **self._read_rows(self._poll_rows, instance, errors)})
            )
        return tuple(read)

    def _read_rows(
        self, rows: list[Metric[Any]], instance: MigDevice, errors: Counter[str]
    ) -> dict[Metric[Any], Reading]:
        readings: dict[Metric[Any], Reading] = {}
        for row in rows:
            try:
                readings[row] = self._gate.filter(row, row.read(instance), readings, errors)
            except NVMLError as error:
                errors[error_name(error)] += 1
        return readings

    def _update_instances(self, errors: Counter[str], *, search: bool) -> None:
        """Read the memory of all instances, after a search if one is due."""
        if search or self._is_search_incomplete:
            self._search(errors)
            search = True
        failures = self._read_memory()
        if failures and not search:
            self._search(errors)
            failures = self._read_memory()
        errors.update(failures)

    def _read_memory(self) -> list[str]:
        """Read the memory of each instance; return the names of the errors."""
        ask = self._gpu.nvml.nvmlDeviceGetMemoryInfo
        version = () if self._gpu.lacks(ask, MEMORY_V2) else (MEMORY_V2,)
        failures: list[str] = []
        for uuid, instance in self._instances.items():
            instance.memory = None
            try:
                if self._gpu.nvml.nvmlDeviceGetUUID(instance.handle) == uuid:
                    instance.memory = ask(instance.handle, *version)
                else:
                    failures.append(RECONFIGURED)
            except NVMLError as error:
                failures.append(error_name(error))
        return failures

    def _search(self, errors: Counter[str]) -> None:
        before, self._instances = self._instances, {}
        self._is_search_incomplete = False
        try:
            for instance in self._find(errors):
                self._instances[instance.identity.uuid] = instance
        except NVMLError as error:
            self._fail(error, errors)
        if self._is_search_incomplete:  # those not found may still exist; their next answer decides
            self._instances = before | self._instances
        if any(_changed(old, self._instances.get(uuid)) for uuid, old in before.items()):
            errors[RECONFIGURED] += 1
        old, new = _group_by_gpu_instance(before), _group_by_gpu_instance(self._instances)
        for gpu_instance in old:
            if old[gpu_instance] != new.get(gpu_instance):
                self._gpu.gpm.drop(gpu_instance)

    def _find(self, errors: Counter[str]) -> Iterable[MigDevice]:
        nvml, gpu = self._gpu.nvml, self._gpu
        if not gpu.divided:
            return
        gpu_uuid = nvml.nvmlDeviceGetUUID(gpu.handle)
        for index in range(min(gpu.try_query(nvml.nvmlDeviceGetMaxMigDeviceCount) or 0, MAX_INSTANCES)):
            try:
                handle = nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu.handle, index)
                identity, attributes = self._identify(handle), partial(nvml.nvmlDeviceGetAttributes_v2, handle)
                yield MigDevice(gpu, gpu_uuid, handle, identity, if_supported(attributes))
            except NVMLError as error:
                if code_of(error) not in NO_MIG_DEVICE:
                    self._fail(error, errors)

    def _fail(self, error: Exception, errors: Counter[str]) -> None:
        errors[error_name(error)] += 1
        self._is_search_incomplete = True

    def _identify(self, handle: Handle) -> MigIdentity:
        nvml = self._gpu.nvml
        _, _, profile = nvml.nvmlDeviceGetName(handle).partition(" MIG ")
        return MigIdentity(
            uuid=nvml.nvmlDeviceGetUUID(handle),
            gpu_instance=nvml.nvmlDeviceGetGpuInstanceId(handle),
            compute_instance=nvml.nvmlDeviceGetComputeInstanceId(handle),
            profile=profile,
        )


def _changed(old: MigDevice, new: MigDevice | None) -> bool:
    return new is None or new.identity != old.identity


def _group_by_gpu_instance(instances: Mapping[str, MigDevice]) -> Mapping[int, set[MigIdentity]]:
    """Group identities by GPU instance: a new GPU instance may get the number of an old one."""
    found: defaultdict[int, set[MigIdentity]] = defaultdict(set)
    for instance in instances.values():
        found[instance.identity.gpu_instance].add(instance.identity)
    return found
