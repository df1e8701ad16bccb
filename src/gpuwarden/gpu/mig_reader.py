"""Read the MIG instances of one GPU: each row of their table in its tier."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from gpuwarden.gpu.device import Device
from gpuwarden.gpu.metrics import MigReadings
from gpuwarden.gpu.mig import Instance, Instances
from gpuwarden.gpu.snapshot import MigIdentity, MigInstance
from gpuwarden.metrics.model import Metric, Reading
from gpuwarden.nvml.binding import NVMLError, error_name


class MigReader:
    """Keeps what the slow tier has read of the instances. Used by the GPU's one reader."""

    def __init__(self, gpu: Device, opted_in: frozenset[str]) -> None:
        self._instances = Instances(gpu)
        rows = [row for row in MigReadings.rows if not row.opt_in or row.opt_in in opted_in]
        self._poll_rows = [row for row in rows if row.tier == "poll"]
        self._slow_rows = [row for row in rows if row.tier == "slow"]
        self._kept: dict[MigIdentity, Mapping[Metric[Any], Reading]] = {}

    @property
    def by_ids(self) -> Mapping[tuple[int | None, int | None], Instance]:
        """The instances of the last reading by the ids of their GPU and compute instance."""
        return {(i.identity.gpu_instance, i.identity.compute_instance): i for i in self._instances.present}

    @property
    def divided(self) -> bool:
        """Whether there were instances in the last reading, or it is not known."""
        return self._instances.expected

    def forget(self) -> None:
        """Forget all instances: the driver was initialised anew, or the GPU reset."""
        self._instances.forget()

    def read(self, errors: Counter[str], *, slow: bool) -> tuple[MigInstance, ...]:
        """Read what is due; an instance that was not there before is read whole. Blocks like the driver."""
        self._instances.read(errors, search=slow)
        kept, self._kept = self._kept, {}
        read: list[MigInstance] = []
        for instance in self._instances.present:
            slowly = None if slow else kept.get(instance.identity)
            if slowly is None:
                slowly = _taken(self._slow_rows, instance, errors)
            self._kept[instance.identity] = slowly
            read.append(MigInstance(instance.identity, {**slowly, **_taken(self._poll_rows, instance, errors)}))
        return tuple(read)


def _taken(rows: list[Metric[Any]], instance: Instance, errors: Counter[str]) -> dict[Metric[Any], Reading]:
    readings: dict[Metric[Any], Reading] = {}
    for row in rows:
        try:
            readings[row] = row.read(instance)
        except NVMLError as error:
            errors[error_name(error)] += 1
    return readings
