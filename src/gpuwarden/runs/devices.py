"""Resolution of a run's devices, such as "GPU:0", to UUIDs of GPUs or MIG instances, by evidence."""

from __future__ import annotations

from collections.abc import Mapping

from gpuwarden.gpu.snapshot import Snapshot
from gpuwarden.protocol.messages import Hello


def resolve(hello: Hello, pid: int, snapshot: Snapshot) -> Mapping[str, str]:
    """Map the run's devices to UUIDs of GPUs or MIG instances; a device without sufficient evidence is left out.

    In this order: UUIDs in the run's hello; UUIDs in CUDA_VISIBLE_DEVICES; its indices if CUDA's order equals NVML's;
    for a run of one device, the only GPU or MIG instance on which its process has memory. A device whose UUID is
    unknown here is not resolved by its index, which may count another container's GPUs.
    """
    known = {gpu.identity.uuid for gpu in snapshot.gpus}
    known |= {instance.identity.uuid for gpu in snapshot.gpus for instance in gpu.mig}
    reported = {device: uuid for device, uuid in hello.devices.items() if uuid in known and uuid is not None}
    open_devices = [device for device in hello.devices if device not in reported and _ordinal(device) is not None]
    visible = _visible(hello, snapshot)
    unreported = [device for device in open_devices if hello.devices[device] is None]
    found = {device: visible[n] for device in unreported if (n := _ordinal(device)) is not None and n in visible}
    if not found and len(open_devices) == 1:
        processes = ((gpu, process) for gpu in snapshot.gpus for process in gpu.processes if process.pid == pid)
        holding = [process.instance or gpu.identity.uuid for gpu, process in processes]
        found = dict(zip(open_devices, holding, strict=True)) if len(holding) == 1 else {}
    return reported | found


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
    models = {gpu.identity.name for gpu in snapshot.gpus if not gpu.identity.provisional}
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
