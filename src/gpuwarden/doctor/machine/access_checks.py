"""Checks of the access to GPUs: containers, device files, cgroups, and CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

import errno
import grp
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from gpuwarden.doctor.machine.gpu_findings import answering_gpus
from gpuwarden.doctor.machine.machine_files import (
    find_container,
    is_wsl,
    list_gpu_nodes,
    list_pci_gpus,
    missing_driver,
    module_version,
)
from gpuwarden.doctor.model import CheckResult, Context, check, failed, flagged, passed, skipped, warned
from gpuwarden.gpu.snapshot import GPUS_HIDDEN, Gpu
from gpuwarden.nvml.troubleshooting import list_kernel_gpus


def _missing_nodes(context: Context) -> str:
    """Return why there are no device files to check; empty if there should be some."""
    reason = "WSL2 has none" if is_wsl(context) else missing_driver(context)
    if module_version(context) is None and not list_gpu_nodes(context):
        return reason or "there are none here, and the driver answers without them"
    return reason


@check("device.nodes", "This user can open /dev/nvidiactl and the GPUs' /dev/nvidia*; if not: mode or cgroup.")
def _check_nodes(context: Context) -> Iterator[CheckResult]:
    reason = _missing_nodes(context)
    yield skipped(reason) if reason else _check_gpu_nodes(context)


def _check_gpu_nodes(context: Context) -> CheckResult:
    gpus = list_gpu_nodes(context)
    if not gpus:
        return failed(
            "There are no GPU device files, such as /dev/nvidia0.",
            "Programs open a GPU through them.",
            "Create them: sudo nvidia-modprobe -c 0, or sudo nvidia-smi",
        )
    errors = {path: error for path in [context.dev / "nvidiactl", *gpus] if (error := _open_error(path))}
    denied = [path for path in gpus if errors.get(path) == errno.EPERM]
    if not errors:
        return passed(f"nvidiactl and {_count(len(gpus), 'GPU')} can be opened")
    if len(errors) == len(denied) < len(gpus):  # a part of the machine, as in a job or a container
        return passed(f"{len(gpus) - len(denied)} of {len(gpus)} GPUs; the cgroup denies the others to this job")
    path, error = next(iter(errors.items()))
    more = f", and {len(errors) - 1} more" if errors[path] and len(errors) > 1 else ""
    return failed(
        f"{path} cannot be opened: {os.strerror(error)}{_cause_text(path, error)}{more}.",
        "Programs of this user find no GPU, or fewer than there are.",
        _permission_fix(context, path, error),
    )


@check("device.uvm", "This user can open /dev/nvidia-uvm, without which CUDA does not start.")
def _check_uvm(context: Context) -> Iterator[CheckResult]:
    uvm = context.dev / "nvidia-uvm"
    if reason := _missing_nodes(context):
        yield skipped(reason)
    elif error := _open_error(uvm):
        yield failed(
            f"{uvm} cannot be opened: {os.strerror(error)}.",
            "CUDA cannot start without it (cuInit fails), though nvidia-smi works.",
            "sudo modprobe nvidia-uvm && sudo nvidia-modprobe -u -c 0"
            if error == errno.ENOENT
            else _permission_fix(context, uvm, error),
        )
    else:
        yield passed("nvidia-uvm can be opened")


def _open_error(path: Path) -> int:
    """Return the error of opening a device file as CUDA does; 0 if it can be opened."""
    try:
        os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC))
    except OSError as error:
        return error.errno or errno.EIO
    return 0


def _cause_text(path: Path, error: int) -> str:
    if error == errno.EPERM:
        return " (by the device limits of the cgroup)"
    if error == errno.EACCES:
        found = path.stat()
        return f" (mode {found.st_mode & 0o777:o}, group {_group_name(found.st_gid)})"
    return ""


def _permission_fix(context: Context, path: Path, error: int) -> str:
    """Return what gives access to a device file. EPERM comes from the cgroup, EACCES from the file's mode."""
    if error == errno.EPERM:
        if "SLURM_JOB_ID" in context.environ:
            return "Ask Slurm for a GPU: srun --gres=gpu:1"
        container = find_container(context)
        unit = "Allow the device: for a systemd unit DeviceAllow=char-nvidia* rw, for a job request a GPU"
        return container.start if container else unit
    if error == errno.EACCES:
        group = path.stat().st_gid
        keep = "to keep it: options nvidia NVreg_DeviceFileMode=0666 in /etc/modprobe.d/"
        joined = f"sudo usermod -aG {_group_name(group)} $USER, then log in again"
        return joined if group else f"sudo chmod 666 {path}; {keep}"
    if error == errno.ENOENT:
        return "Create it: sudo nvidia-modprobe -c 0, or sudo nvidia-smi"
    return "The GPU does not start; the reason is in: sudo dmesg | grep -i nvrm"


def _group_name(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


@check("device.count", "PCI bus, kernel module and NVML have the same number of GPUs.")
def _check_count(context: Context) -> Iterator[CheckResult]:
    snapshot = context.survey()
    listed = 0 if snapshot.fault == GPUS_HIDDEN else snapshot.enumerated
    kernel = len(list_kernel_gpus(context.root))
    nodes = list_gpu_nodes(context) if find_container(context) else []
    passed_on = sum(_open_error(path) != errno.EPERM for path in nodes)
    holder = "this container" if passed_on else "the kernel module"
    on_bus = sum(gpu.vendor == "NVIDIA" and gpu.driver == "nvidia" for gpu in list_pci_gpus(context))
    if listed is None:
        yield skipped("NVML does not answer")
    elif on_bus > kernel > 0 and not find_container(context):  # whose /proc has its own GPUs, and /sys all
        yield failed(
            f"The driver started {kernel} of the {on_bus} GPUs on the PCI bus.",
            "A GPU that does not start is missing in every program.",
            "sudo dmesg | grep -i nvrm has the reason; power the machine off and on, reseat the board",
        )
    elif listed < (expected := passed_on or kernel):
        yield flagged(
            "warn" if listed else "fail",
            f"NVML lists {listed} of the {expected} GPUs that {holder} has.",
            "The others are hidden from this user: by a cgroup, by permissions, or they do not start.",
            "Check device.nodes; in a job or a container, ask for more GPUs",
        )
    elif listed < kernel:
        yield skipped(
            f"{_count(listed, 'GPU')} of {kernel} of the host; how many the container should have is not known"
        )
    else:
        yield passed(_count(listed, "GPU"))


@check("device.visible", "GPUs that CUDA_VISIBLE_DEVICES leaves, and whether CUDA numbers them as nvidia-smi.")
def _check_visible(context: Context) -> Iterator[CheckResult]:
    value = context.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = context.survey().gpus
    if value is None:
        yield _check_order(context, gpus, "CUDA_VISIBLE_DEVICES is not set")
        return
    tokens = [token.strip() for token in value.split(",")]
    visible = _resolve(tokens, gpus)
    why = "CUDA hides all other GPUs from every program started from this shell, without a message."
    if tokens[0] in ("", "-1", "NoDevFiles"):
        yield failed(
            f"CUDA_VISIBLE_DEVICES is {f'{value!r}' if value else 'set to an empty text'}: CUDA finds no GPU.",
            why,
            "unset CUDA_VISIBLE_DEVICES",
        )
    elif not answering_gpus(context):
        yield skipped("no GPU answers")
    elif len(visible) < len(tokens):
        wrong = tokens[len(visible)]
        repeated = wrong in tokens[: len(visible)]
        yield flagged(
            "fail" if repeated or not visible else "warn",
            f"CUDA_VISIBLE_DEVICES is {value!r}: {wrong!r} is {'there twice' if repeated else 'no GPU of this machine'}"
            + (", so CUDA finds none." if repeated or not visible else " and ends the list."),
            why,
            "unset CUDA_VISIBLE_DEVICES, or name indices or UUIDs of: nvidia-smi -L",
        )
    elif any(token.isdecimal() for token in tokens):
        yield _check_order(context, gpus, f"CUDA_VISIBLE_DEVICES={value}: {_count(len(visible), 'GPU')}")
    else:
        yield passed(f"CUDA_VISIBLE_DEVICES names {_count(len(visible), 'GPU')}")


def _resolve(tokens: Sequence[str], gpus: Sequence[Gpu]) -> list[str]:
    """Return the UUIDs that CUDA takes: up to the first entry that is no device, or is there twice."""
    uuids = [gpu.identity.uuid for gpu in gpus]
    instances = [instance.identity.uuid for gpu in gpus for instance in gpu.mig]
    found: list[str] = []
    for token in tokens:
        if token.isdecimal():
            matches = uuids[int(token) : int(token) + 1]
        else:
            known = uuids if token.startswith("GPU-") else instances if token.startswith("MIG-") else []
            matches = [uuid for uuid in known if uuid.startswith(token)]
        if len(matches) != 1 or matches[0] in found:
            break
        found += matches
    return found


def _check_order(context: Context, gpus: Sequence[Gpu], usual: str) -> CheckResult:
    """Check that CUDA numbers the GPUs as nvidia-smi does; its default order has the fastest GPU first."""
    models = {gpu.identity.name for gpu in gpus if gpu.up}
    if len(models) > 1 and context.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        return warned(
            f"The GPUs are of {len(models)} models, and CUDA numbers the fastest first, unlike nvidia-smi.",
            "GPU 0 of a program may be another one than GPU 0 of nvidia-smi and gpuwarden.",
            "export CUDA_DEVICE_ORDER=PCI_BUS_ID",
        )
    return passed(usual)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


ACCESS_CHECKS = (_check_nodes, _check_uvm, _check_count, _check_visible)
