"""Facts on CUDA versions that no installed file has. State of November 2026.

An environment's own files come first: the build's CUDA version, its capabilities and its pins are read from them.

Sources: CUDA Toolkit Release Notes, table "CUDA Toolkit and Corresponding Driver Versions", and the names of the
installers (drivers of a release); CUDA Compatibility, "Minor Version Compatibility" (minimum of a major version); CUDA
C++ Programming Guide, "Compute Capabilities" (binaries and PTX); the libraries' names: NVIDIA's wheels.
"""

from __future__ import annotations

import re
from typing import Literal

Version = tuple[int, ...]

# By CUDA release: the driver that came with it. It and newer ones compile the PTX of that release.
DRIVERS = {
    (11, 8): "520.61.05",
    (12, 0): "525.60.13",
    (12, 1): "530.30.02",
    (12, 2): "535.54.03",
    (12, 3): "545.23.06",
    (12, 4): "550.54.14",
    (12, 5): "555.42.02",
    (12, 6): "560.28.03",
    (12, 8): "570.86.10",
    (12, 9): "575.51.03",
    (13, 0): "580.65.06",
    (13, 1): "590.44.01",
}
# By CUDA major version: the oldest driver that runs all its releases, as far as they have a binary for the GPU.
MIN_DRIVERS = {11: "450.80.02", 12: "525.60.13", 13: "580.65.06"}
# By CUDA major version: the libraries that TensorFlow and JAX load. torch's are in its own files.
LIBRARIES = {
    11: ("libcudart.so.11.0", "libcublas.so.11", "libcufft.so.10", "libcusolver.so.11", "libcusparse.so.11"),
    12: ("libcudart.so.12", "libcublas.so.12", "libcufft.so.11", "libcusolver.so.11", "libcusparse.so.12"),
    13: ("libcudart.so.13", "libcublas.so.13", "libcufft.so.12", "libcusolver.so.12", "libcusparse.so.12"),
}
_TARGET = re.compile(r"(sm|compute)_(\d+)(\d)([a-z]?)")

Kernels = Literal["binary", "ptx", "too_old", "too_new"]  # that a build has for a GPU, or why it has none


def parse_version(text: str) -> Version:
    """Return the numbers of a version, up to the first part that is none; 12.5.1 and 590.48.01 are such."""
    numbers = re.match(r"\d+(\.\d+)*", text)
    return () if numbers is None else tuple(map(int, numbers[0].split(".")))


def parse_cudnn(number: int) -> Version:
    """Return the version of cudnnGetVersion(): 90300 is 9.3.0, and 8907 is 8.9.7."""
    major, rest = divmod(number, 10000 if number >= 90000 else 1000)  # noqa: PLR2004 - version 9 changed the form
    return (major, rest // 100, rest % 100)


def format_version(version: Version) -> str:
    """Return a version as text."""
    return ".".join(map(str, version))


def find_kernels(targets: tuple[str, ...], capability: Version) -> Kernels:
    """Return which kernels a build has for a GPU of a compute capability.

    A binary, `sm_XY`, runs on the same major and on the same or a higher minor version; `compute_XY` is PTX, which the
    driver compiles for all higher ones. A letter at the end ties either to that capability, or to its family.
    """
    parsed = [
        (kind, (int(major), int(minor)), letter)
        for kind, major, minor, letter in (match.groups() for match in map(_TARGET.fullmatch, targets) if match)
    ]
    if any(
        own == capability if letter == "a" else own[0] == capability[0] and own <= capability
        for kind, own, letter in parsed
        if kind == "sm"
    ):
        return "binary"
    if any(own <= capability and not letter for kind, own, letter in parsed if kind == "compute"):
        return "ptx"
    return "too_old" if all(capability < own for _, own, _ in parsed) else "too_new"


def accepts(driver: str, driver_cuda: str, cuda: Version) -> Literal["all", "binaries", "none"]:
    """Return what of a build with a CUDA version a driver runs: all, binaries without its PTX, or none."""
    if parse_version(driver_cuda)[:2] >= cuda[:2]:
        return "all"
    minimum = MIN_DRIVERS.get(cuda[0])
    return "binaries" if minimum is not None and parse_version(driver) >= parse_version(minimum) else "none"


def name_driver(cuda: Version, minimum: bool = False) -> str:  # noqa: FBT001, FBT002 - one of two columns
    """Return the driver for a CUDA version in words: for all of it, or the minimum for binaries."""
    version = MIN_DRIVERS.get(cuda[0]) if minimum else DRIVERS.get((cuda[0], cuda[1]))
    return f"{version} or newer" if version else f"for CUDA {cuda[0]}.{cuda[1]} or newer"
