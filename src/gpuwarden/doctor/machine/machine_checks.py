"""Checks of the machine: the GPU on the bus, WSL2 and containers."""

from __future__ import annotations

from collections.abc import Iterator

from gpuwarden.doctor.frameworks.shared_libraries import LibrarySearch
from gpuwarden.doctor.machine.machine_files import (
    NO_GPU,
    find_container,
    is_container_without_gpus,
    is_wsl,
    list_pci_gpus,
    missing_driver,
)
from gpuwarden.doctor.model import CheckResult, Context, check, failed, passed, skipped


@check("machine.gpu", "The machine has an NVIDIA GPU, also one without a driver.")
def _check_gpu(context: Context) -> Iterator[CheckResult]:
    gpus = list_pci_gpus(context)
    count = sum(gpu.vendor == "NVIDIA" for gpu in gpus)
    if is_wsl(context):
        yield skipped("WSL2 shows no PCI bus")
    elif count:
        yield passed(f"{count} NVIDIA GPU{'s' * (count > 1)} on the PCI bus")
    elif missing_driver(context) != NO_GPU:
        yield passed("an NVIDIA GPU, which the PCI bus does not show here")
    else:
        others = ", ".join(sorted({gpu.vendor for gpu in gpus}))
        yield failed(
            f"This machine has no NVIDIA GPU{f'; its GPU is from {others}' if others else ''}.",
            "TensorFlow, PyTorch and JAX compute on the CPU here, many times slower.",
            "Use a machine with an NVIDIA GPU; in a virtual machine, have the GPU passed through to it.",
        )


@check("machine.wsl", "WSL2 passes the GPU through, and no Linux driver hides Windows' driver.")
def _check_wsl(context: Context) -> Iterator[CheckResult]:
    if not is_wsl(context):
        yield skipped("not WSL2")
    elif not (context.dev / "dxg").exists():
        yield failed(
            "This is WSL without a GPU: /dev/dxg is missing.",
            "Only WSL2 passes the GPU through, and only with a driver for it in Windows.",
            "Install NVIDIA's driver in Windows, then run in PowerShell: wsl --update; wsl --shutdown",
        )
    elif (foreign := LibrarySearch(context).find("libcuda.so.1")) and "wsl" not in foreign.path.parts:
        yield failed(
            f"A Linux driver is installed in WSL2: {foreign.path} hides the library of Windows' driver.",
            "CUDA loads the wrong libcuda and finds no GPU.",
            "Remove the Linux driver: sudo apt-get purge 'libnvidia-compute-*' 'nvidia-driver-*'",
        )
    else:
        yield passed("WSL2 with Windows' driver")


@check("machine.container", "The container runtime passes GPUs and libcuda through.")
def _check_container(context: Context) -> Iterator[CheckResult]:
    container = find_container(context)
    capabilities = context.environ.get("NVIDIA_DRIVER_CAPABILITIES", "all")
    if container is None:
        yield skipped("not in a container")
    elif is_container_without_gpus(context):
        devices = context.environ.get("NVIDIA_VISIBLE_DEVICES")
        cause = f"NVIDIA_VISIBLE_DEVICES is {devices}" if devices in ("none", "void") else "it has no /dev/nvidia0"
        yield failed(
            f"This is {container.name} without GPUs: {cause}, though the host has a driver.",
            "The runtime passes no GPU through, so frameworks use the CPU.",
            container.start,
        )
    elif not {"all", "compute"} & set(capabilities.split(",")):
        yield failed(
            f"This is {container.name} without CUDA: NVIDIA_DRIVER_CAPABILITIES is {capabilities}.",
            "The runtime does not mount libcuda: nvidia-smi works, and frameworks find no GPU.",
            "Start it with: -e NVIDIA_DRIVER_CAPABILITIES=compute,utility",
        )
    else:
        yield passed(container.name.partition(" ")[2])


MACHINE_CHECKS = (_check_gpu, _check_wsl, _check_container)
