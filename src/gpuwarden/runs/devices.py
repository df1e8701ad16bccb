"""Devices of a run: resolution of names such as "GPU:0" to UUIDs, and proof that its process uses them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from gpuwarden.gpu.snapshot import Snapshot
from gpuwarden.owners.processes import MPS_COMM, ProcessIdentity
from gpuwarden.protocol.messages import Hello

# Amounts of CUDA_MPS_PINNED_DEVICE_MEM_LIMIT.
_AMOUNT = re.compile(r"([0-9]{1,15})([KMG]?)B?", re.ASCII | re.IGNORECASE)
_SHIFTS = {"": 0, "K": 10, "M": 20, "G": 30}


@dataclass(frozen=True, slots=True)
class ListedProcesses:
    """Pids that the driver lists in one poll, by UUID of each GPU or MIG instance that answered.

    A run that is not listed on one of the `incomplete` devices may be there nevertheless. `trust_reports`: the reports
    of runs are sufficient proof.
    """

    pids: Mapping[str, frozenset[int]] = field(default_factory=dict)
    incomplete: frozenset[str] = frozenset()
    trust_reports: bool = False

    def has(self, pid: int) -> bool:
        """Return whether the driver lists a process on a device; always true with `trust_reports`."""
        return self.trust_reports or any(pid in pids for pids in self.pids.values())

    def verify(self, claimed: Iterable[str], own: Collection[int], before: Mapping[str, bool]) -> dict[str, bool]:
        """Return the devices that a run with the processes `own` uses, and whether the driver confirms it.

        Of the `claimed` devices, those whose complete list has none of the run's processes are left out. A device that
        did not answer keeps its entry of `before`.
        """
        found: dict[str, bool] = {}
        for uuid in claimed:
            pids = self.pids.get(uuid)
            if pids is None:
                found[uuid] = before.get(uuid, self.trust_reports)
            elif self.trust_reports or not pids.isdisjoint(own):
                found[uuid] = True
            elif uuid in self.incomplete or not own:
                found[uuid] = False
        return found | {uuid: proven for uuid, proven in before.items() if uuid not in self.pids}


def list_processes(
    snapshot: Snapshot, identities: Mapping[int, ProcessIdentity], *, sees_host: bool, trust_reports: bool
) -> ListedProcesses:
    """Return the processes of a poll; `sees_host`: this daemon has the pids of the host, as the driver does."""
    mps_servers = {pid for pid, identity in identities.items() if identity.comm == MPS_COMM}
    pids: dict[str, frozenset[int]] = {}
    incomplete: set[str] = set()
    for gpu in snapshot.gpus:
        if not gpu.up:
            continue
        uuids = [gpu.identity.uuid, *(each.identity.uuid for each in gpu.mig)]
        for uuid in uuids:
            where = (uuid, None) if gpu.mig else (None,)
            pids[uuid] = frozenset(each.pid for each in gpu.processes if each.pid and each.instance in where)
        has_mps = any(mps_servers & pids[uuid] for uuid in uuids)
        if not sees_host or "compute" not in gpu.process_lists or has_mps:
            incomplete.update(uuids)
    return ListedProcesses(pids, frozenset(incomplete), trust_reports)


def resolve(hello: Hello, pid: int, snapshot: Snapshot) -> Mapping[str, str]:
    """Map the run's devices to UUIDs of GPUs or MIG instances; a device without sufficient evidence is left out.

    In this order: UUIDs in the run's hello; UUIDs in CUDA_VISIBLE_DEVICES; its indices if CUDA's order equals NVML's;
    for a run of one device, the only GPU or MIG instance on which its process has memory. A device whose UUID is
    unknown here is not resolved by its index, which may count another container's GPUs.
    """
    reported = {device: uuid for device, uuid in hello.devices.items() if uuid and snapshot.gpu_with(uuid)}
    open_devices = [device for device in hello.devices if device not in reported and _ordinal(device) is not None]
    unreported = [device for device in open_devices if hello.devices[device] is None]
    visible = _visible(hello, snapshot) if unreported else {}
    found = {device: visible[n] for device in unreported if (n := _ordinal(device)) is not None and n in visible}
    if not found and len(open_devices) == 1:
        processes = ((gpu, process) for gpu in snapshot.gpus for process in gpu.processes if process.pid == pid)
        holding = [process.instance or gpu.identity.uuid for gpu, process in processes]
        found = dict(zip(open_devices, holding, strict=True)) if len(holding) == 1 else {}
    return reported | found


def resolve_mps_limits(hello: Hello, uuids: Mapping[str, str]) -> Mapping[str, int]:
    """Return the run's CUDA_MPS_PINNED_DEVICE_MEM_LIMIT in bytes by UUID, of its devices with these UUIDs.

    Like "0=1G,1=512MB": devices by CUDA's ordinal or by UUID (NVIDIA MPS, environment variables). An entry that is not
    of this form is left out.
    """
    found: dict[str, int] = {}
    for entry in hello.mps_memory_limit.split(",") if hello.mps_memory_limit else ():
        device, _, amount = (part.strip() for part in entry.partition("="))
        match = _AMOUNT.fullmatch(amount)
        for name, uuid in uuids.items():
            is_ordinal = name == f"GPU:{device}"
            if match and (is_ordinal or (device.startswith("GPU-") and uuid.startswith(device))):
                found[uuid] = int(match[1]) << _SHIFTS[match[2].upper()]
    return found


def _ordinal(device: str) -> int | None:
    """Return n of "GPU:n"; None for other devices."""
    kind, _, number = device.partition(":")
    return int(number) if kind == "GPU" and number.isascii() and number.isdigit() else None


def _visible(hello: Hello, snapshot: Snapshot) -> dict[int, str]:
    """Return CUDA's ordinals of the run as UUIDs, as far as CUDA_VISIBLE_DEVICES proves them.

    CUDA orders GPUs by speed unless CUDA_DEVICE_ORDER=PCI_BUS_ID; equal models tie and stay in PCI order, as in NVML
    (CUDA C++ Programming Guide, environment variables). A process that has a MIG instance has that one device alone, by
    its UUID or GPU, GPU instance and compute instance (NVIDIA MIG User Guide); a divided GPU is no device of CUDA's.
    """
    entries = [entry.strip() for entry in (hello.visible_devices or "").split(",") if entry.strip()]
    models = {gpu.identity.name for gpu in snapshot.gpus if not gpu.identity.is_provisional}
    by_index = {gpu.identity.index: gpu.identity.uuid for gpu in snapshot.gpus if not gpu.mig}
    same_order = hello.device_order == "PCI_BUS_ID" or len(models) == 1
    same_order = same_order and len(by_index) == len(snapshot.gpus)
    if hello.visible_devices is None:
        return by_index if same_order else {}
    if entries and entries[0].startswith("MIG-"):
        instances = _instances(entries[0], snapshot)
        return {0: instances[0]} if len(instances) == 1 else {}
    visible: dict[int, str] = {}
    for ordinal, entry in enumerate(entries):
        matches = [uuid for uuid in by_index.values() if entry.startswith("GPU-") and uuid.startswith(entry)]
        if not matches and same_order and entry.isascii() and entry.isdigit() and int(entry) in by_index:
            matches = [by_index[int(entry)]]
        if len(matches) != 1:
            break  # CUDA stops at the first entry it cannot resolve
        visible[ordinal] = matches[0]
    return visible


def _instances(entry: str, snapshot: Snapshot) -> list[str]:
    """Return the UUIDs of the MIG instances that an entry may mean."""
    return [
        each.identity.uuid
        for gpu in snapshot.gpus
        for each in gpu.mig
        if each.identity.uuid.startswith(entry)
        or entry == f"MIG-{gpu.identity.uuid}/{each.identity.gpu_instance}/{each.identity.compute_instance}"
    ]
