"""Subjects of DCGM's samples, and the labels that dcgm-exporter gives them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gpuwarden.dcgm.rates import CounterRates
from gpuwarden.gpu.snapshot import Gpu, MigInstance
from gpuwarden.metrics.model import Labels
from gpuwarden.state import State

# As dcgm-exporter writes them (internal/pkg/rendermetrics, read at 1f7abdb); since its pull request 655 the host name
# stands under `hostname`, and both are here. A label that is empty is none for Prometheus.
LABELS = (
    "gpu",
    "UUID",
    "pci_bus_id",
    "device",
    "modelName",
    "Hostname",
    "hostname",
    "DCGM_FI_DRIVER_VERSION",
    "GPU_I_PROFILE",
    "GPU_I_ID",
)


@dataclass(frozen=True, slots=True)
class Entity:
    """A GPU at one poll, or one of its GPU instances (MIG)."""

    gpu: Gpu
    state: State
    rates: CounterRates
    instance: MigInstance | None = None


def entities(state: State, rates: CounterRates) -> Iterator[Entity]:
    """Yield each GPU and its GPU instances.

    Compute instances of a GPU instance share its memory and activity, so one of them represents all.
    """
    for gpu in state.snapshot.gpus:
        yield Entity(gpu, state, rates)
        instances: dict[int, MigInstance] = {}
        for each in gpu.mig:
            instances.setdefault(each.identity.gpu_instance, each)
        yield from (Entity(gpu, state, rates, instance) for instance in instances.values())


def labels(entity: Entity, hostname: str) -> Labels:
    """Return the values of LABELS."""
    who, driver = entity.gpu.identity, entity.state.snapshot.driver
    return (
        str(who.index),
        who.uuid,
        who.pci_bus_id.upper(),
        f"nvidia{who.index}",
        who.name,
        hostname,
        hostname,
        driver.version if driver else "",
        *_instance_labels(entity.instance),
    )


def _instance_labels(instance: MigInstance | None) -> tuple[str, str]:
    if instance is None:
        return "", ""
    # A compute instance that has only a part of its GPU instance says so before it: 1c.3g.40gb.
    _part, cut, profile = instance.identity.profile.partition("c.")
    return profile if cut else instance.identity.profile, str(instance.identity.gpu_instance)
