"""Identity of a GPU, kept when it no longer answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from gpuwarden.nvml.constants import ARCHITECTURES, BRANDS
from gpuwarden.nvml.interface import Handle, Nvml
from gpuwarden.nvml.return_codes import GPU_GONE, NVMLError, code_of, if_supported

T = TypeVar("T")

UNIDENTIFIED = "unidentified"  # name of a GPU that the driver lists and that has not answered yet


@dataclass(frozen=True, slots=True)
class GpuIdentity:
    """Identity of a GPU, read once; empty where it is unknown.

    `index` is NVML's index at that time and may change: the UUID identifies the GPU.
    """

    uuid: str
    index: int
    name: str
    pci_bus_id: str
    vbios_version: str
    brand: str = ""
    architecture: str = ""
    compute_capability: str = ""
    serial: str = ""
    board_part_number: str = ""
    minor_number: str = ""  # of /dev/nvidiaN
    gsp_firmware_version: str = ""

    @property
    def is_provisional(self) -> bool:
        """True if the GPU has not answered yet: its `uuid` is then its PCI address, or its index without one."""
        return self.name == UNIDENTIFIED

    def has_address(self, pci: str) -> bool:
        """Return whether the GPU has a PCI address of the kernel's form: NVML's has a domain of eight digits."""
        return self.pci_bus_id.endswith(pci)

    def has_same_place(self, other: GpuIdentity) -> bool:
        """Return whether another GPU has the same PCI address, or index if the address is unknown."""
        return self.pci_bus_id == other.pci_bus_id if self.pci_bus_id else self.index == other.index


@dataclass(frozen=True, slots=True)
class MigIdentity:
    """Identity of a MIG instance; `profile` is NVIDIA's name of its size (1g.10gb), empty if the driver has none."""

    uuid: str
    gpu_instance: int
    compute_instance: int
    profile: str


def identify(nvml: Nvml, handle: Handle, index: int) -> GpuIdentity:
    """Read the identity of a GPU; all but UUID and name are optional. Blocks; raises NVMLError."""
    uuid, name = nvml.nvmlDeviceGetUUID(handle), nvml.nvmlDeviceGetName(handle)
    pci = if_supported(lambda: nvml.nvmlDeviceGetPciInfo(handle))
    capability = _optional(lambda: nvml.nvmlDeviceGetCudaComputeCapability(handle))
    minor = _optional(lambda: nvml.nvmlDeviceGetMinorNumber(handle))
    return GpuIdentity(
        uuid=uuid,
        index=index,
        name=name,
        pci_bus_id=decode_text(pci.busId).lower() if pci else "",
        vbios_version=_optional(lambda: nvml.nvmlDeviceGetVbiosVersion(handle)) or "",
        brand=BRANDS.get(_optional(lambda: nvml.nvmlDeviceGetBrand(handle)) or 0, ""),
        architecture=ARCHITECTURES.get(_optional(lambda: nvml.nvmlDeviceGetArchitecture(handle)) or 0, ""),
        compute_capability=".".join(map(str, capability)) if capability else "",
        serial=_optional(lambda: nvml.nvmlDeviceGetSerial(handle)) or "",
        board_part_number=_optional(lambda: nvml.nvmlDeviceGetBoardPartNumber(handle)) or "",
        minor_number="" if minor is None else str(minor),
        gsp_firmware_version=_optional(lambda: nvml.nvmlDeviceGetGspFirmwareVersion(handle)) or "",
    )


def provisional_identity(index: int, addresses: Sequence[str]) -> GpuIdentity:
    """Return what is known of a GPU that does not answer; `addresses` are those of all GPUs, empty if unknown."""
    address = addresses[index] if addresses else ""
    return GpuIdentity(address or f"index-{index}", index, UNIDENTIFIED, address, vbios_version="")


def _optional(ask: Callable[[], T]) -> T | None:
    """Query what is not required to identify a GPU; None where that fails."""
    try:
        return ask()
    except NVMLError as error:
        if code_of(error) in GPU_GONE:
            raise
        return None


def decode_text(answer: str | bytes) -> str:
    """Return a text of NVML, empty for "N/A"; releases of nvidia-ml-py return bytes in places."""
    text = answer.decode(errors="replace") if isinstance(answer, bytes) else answer
    return "" if text.strip("[]") == "N/A" else text
