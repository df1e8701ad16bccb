"""Reader of a GPU's MIG instances: finds them now and then, and at once when one does not answer as itself."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from gpuwarden.gpu.metrics import MigReadings
from gpuwarden.gpu.readings.instance import MigDevice
from gpuwarden.gpu.snapshot import MigInstance
from gpuwarden.metrics.model import Metric, Reading
from gpuwarden.nvml.constants import MEMORY_V2
from gpuwarden.nvml.device import Device
from gpuwarden.nvml.identity import MigIdentity
from gpuwarden.nvml.interface import Attributes, Handle
from gpuwarden.nvml.return_codes import NO_MIG_DEVICE, UNSUPPORTED, NVMLError, code_of, error_name

MAX_INSTANCES = 64  # that are looked for on a GPU; today's hardware has 7
RECONFIGURED = "mig_reconfigured"  # counted with the GPU's errors when an instance that had series is gone


class MigReader:
    """Keeps what the slow tier has read of the instances. Used by the GPU's one reader."""

    def __init__(self, gpu: Device, opted_in: frozenset[str]) -> None:
        self._instances = _Instances(gpu)
        rows = [row for row in MigReadings.rows if not row.opt_in or row.opt_in in opted_in]
        self._poll_rows = [row for row in rows if row.tier == "poll"]
        self._slow_rows = [row for row in rows if row.tier == "slow"]
        self._kept: dict[MigIdentity, Mapping[Metric[Any], Reading]] = {}

    @property
    def by_ids(self) -> Mapping[tuple[int | None, int | None], MigDevice]:
        """The instances of the last reading by the ids of their GPU and compute instance."""
        return {(i.identity.gpu_instance, i.identity.compute_instance): i for i in self._instances.present}

    @property
    def has_instances(self) -> bool:
        """True if there were instances in the last reading, or it is not known."""
        return self._instances.expected

    def clear(self) -> None:
        """Forget all instances: the driver was initialised anew, or the GPU reset."""
        self._instances.clear()

    def read(self, errors: Counter[str], *, slow: bool) -> tuple[MigInstance, ...]:
        """Read what is due; an instance that was not there before is read whole. Blocks like the driver."""
        self._instances.read(errors, search=slow)
        kept, self._kept = self._kept, {}
        read: list[MigInstance] = []
        for instance in self._instances.present:
            slowly = None if slow else kept.get(instance.identity)
            if slowly is None:
                slowly = _read_rows(self._slow_rows, instance, errors)
            self._kept[instance.identity] = slowly
            read.append(MigInstance(instance.identity, {**slowly, **_read_rows(self._poll_rows, instance, errors)}))
        return tuple(read)


def _read_rows(rows: list[Metric[Any]], instance: MigDevice, errors: Counter[str]) -> dict[Metric[Any], Reading]:
    readings: dict[Metric[Any], Reading] = {}
    for row in rows:
        try:
            readings[row] = row.read(instance)
        except NVMLError as error:
            errors[error_name(error)] += 1
    return readings


class _Instances:
    """Finds the instances and reads their memory. Used by the GPU's one reader.

    Each poll asks a handle who it is before its memory: after a reconfiguration a handle may fail, or stand for
    another instance. Then all are looked up anew in the same reading.
    """

    def __init__(self, gpu: Device) -> None:
        self._gpu = gpu
        self._known: dict[str, MigDevice] = {}
        self._unfinished = False  # the last search met an error that was not the instances' absence

    @property
    def present(self) -> Iterable[MigDevice]:
        """The instances of the last reading."""
        return self._known.values()

    @property
    def expected(self) -> bool:
        """True if there were any in the last reading, or it could not find out."""
        return bool(self._known) or self._unfinished

    def clear(self) -> None:
        """Forget all: their handles are of a driver that was initialised anew."""
        self._known = {}

    def read(self, errors: Counter[str], *, search: bool) -> None:
        """Read the memory of all; `search` for others first. Blocks like the driver; failures are counted."""
        if search or self._unfinished:
            self._search(errors)
            search = True
        failures = self._read_memory()
        if failures and not search:
            self._search(errors)
            failures = self._read_memory()
        errors.update(failures)

    def _read_memory(self) -> list[str]:
        """Read each instance's memory; return the names of what went wrong."""
        ask = self._gpu.nvml.nvmlDeviceGetMemoryInfo
        version = () if self._gpu.lacks(ask, MEMORY_V2) else (MEMORY_V2,)
        failures: list[str] = []
        for uuid, instance in self._known.items():
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
        before, self._known = self._known, {}
        self._unfinished = False
        try:
            for instance in self._found(errors):
                self._known[instance.identity.uuid] = instance
        except NVMLError as error:
            self._fail(error, errors)
        if self._unfinished:  # those not found may still be there: whether they are, their next answer shows
            self._known = before | self._known
        if any(_changed(old, self._known.get(uuid)) for uuid, old in before.items()):
            errors[RECONFIGURED] += 1
        old, new = _group_by_gpu_instance(before), _group_by_gpu_instance(self._known)
        for gpu_instance in old:
            if old[gpu_instance] != new.get(gpu_instance):
                self._gpu.gpm.drop(gpu_instance)

    def _found(self, errors: Counter[str]) -> Iterable[MigDevice]:
        nvml, gpu = self._gpu.nvml, self._gpu
        if not gpu.divided:
            return
        gpu_uuid = nvml.nvmlDeviceGetUUID(gpu.handle)
        for index in range(min(gpu.try_query(nvml.nvmlDeviceGetMaxMigDeviceCount) or 0, MAX_INSTANCES)):
            try:
                handle = nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu.handle, index)
                yield MigDevice(gpu, gpu_uuid, handle, self._identify(handle), self._attributes(handle))
            except NVMLError as error:
                if code_of(error) not in NO_MIG_DEVICE:
                    self._fail(error, errors)

    def _fail(self, error: Exception, errors: Counter[str]) -> None:
        errors[error_name(error)] += 1
        self._unfinished = True

    def _identify(self, handle: Handle) -> MigIdentity:
        nvml = self._gpu.nvml
        _, _, profile = nvml.nvmlDeviceGetName(handle).partition(" MIG ")
        return MigIdentity(
            uuid=nvml.nvmlDeviceGetUUID(handle),
            gpu_instance=nvml.nvmlDeviceGetGpuInstanceId(handle),
            compute_instance=nvml.nvmlDeviceGetComputeInstanceId(handle),
            profile=profile,
        )

    def _attributes(self, handle: Handle) -> Attributes | None:
        try:
            return self._gpu.nvml.nvmlDeviceGetAttributes_v2(handle)
        except NVMLError as error:
            if code_of(error) in UNSUPPORTED:
                return None
            raise


def _changed(old: MigDevice, new: MigDevice | None) -> bool:
    return new is None or new.identity != old.identity


def _group_by_gpu_instance(instances: Mapping[str, MigDevice]) -> Mapping[int, set[MigIdentity]]:
    """Group identities by GPU instance: its number alone does not tell one from its successor."""
    found: defaultdict[int, set[MigIdentity]] = defaultdict(set)
    for instance in instances.values():
        found[instance.identity.gpu_instance].add(instance.identity)
    return found
