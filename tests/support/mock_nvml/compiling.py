"""Compile the mock library, once for each state of its sources."""

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCES = Path(__file__).parent / "src"
FLAGS = (
    "-std=gnu2x",
    "-O1",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    "-Wl,-soname,libnvidia-ml.so.1",
)
LIBRARIES = ("-lm", "-lpthread")
INSTALL = "apt-get install gcc libc6-dev"

# Asked for by nvidia-ml-py 13.615 and not exported by the library of driver 590.48.01: left out, so that clients meet
# FunctionNotFound, as they do wherever the Python package is newer than the driver. The functions of operational events
# answer that unless MOCK_NVML_DRIVER is 615 or newer.
NOT_EXPORTED = frozenset(
    {
        "nvmlDeviceGetAccountingStats_v2",
        "nvmlDeviceGetAdaptiveTgpModeInfo_v1",
        "nvmlDeviceGetBBXTimeData_v1",
        "nvmlDeviceGetBankRemapperStatus_v1",
        "nvmlDeviceGetGpuFabricInfo_v4",
        "nvmlDeviceGetNvLinkTelemetrySamples_v1",
        "nvmlDeviceGetRemappedRows_v2",
        "nvmlDeviceGetVgpuSchedulerLog_v2",
        "nvmlDeviceGetVgpuSchedulerState_v2",
        "nvmlDevicePerfMetricsGetSamples_v1",
        "nvmlDeviceSetAdaptiveTgpMode_v1",
        "nvmlDeviceSetMemoryLimits_v1",
        "nvmlDeviceSetNvlinkBwModeAsync_v1",
        "nvmlDeviceSetVgpuSchedulerState_v2",
        "nvmlDeviceVgpuForceGspUnload",
        "nvmlGpuInstanceGetVgpuSchedulerLog_v2",
        "nvmlGpuInstanceGetVgpuSchedulerState_v2",
        "nvmlGpuInstanceSetVgpuSchedulerState_v2",
        "nvmlSystemGetCPER_v1",
    }
)


class CompilerMissingError(RuntimeError):
    """There is no C compiler on this machine."""


def build(directory: Path) -> Path:
    """Return a folder for LD_LIBRARY_PATH that holds the mock, compiled into `directory` if it is not there yet.

    Several processes may build at once: each compiles in a folder of its own, and the first to finish gives it
    its final name. Blocks for some seconds when it compiles.
    """
    compiler = shutil.which("gcc")
    if compiler is None:
        raise CompilerMissingError(f"the mock NVML library needs a C compiler: {INSTALL}")
    stubs = _stubs()
    finished = directory / _key(stubs)
    if not finished.is_dir():
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory, ignore_cleanup_errors=True) as scratch:
            _compile(compiler, Path(scratch), stubs)
            _publish(Path(scratch, "lib"), finished)
    return finished


def _key(stubs: str) -> str:
    """Return the name of a build from all its inputs; the stubs stand for the version of nvidia-ml-py."""
    digest = hashlib.sha256(" ".join(FLAGS).encode() + stubs.encode())
    for source in sorted(SOURCES.glob("*.[ch]")):
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:16]


def _stubs() -> str:
    """Write C that weakly defines every function that nvidia-ml-py may call in a driver of this age."""
    found = importlib.util.find_spec("pynvml")
    assert found is not None, "nvidia-ml-py is a dependency of gpuwarden"
    assert found.origin is not None
    asked = set(re.findall(r'_nvmlGetFunctionPointer\("(\w+)"\)', Path(found.origin).read_text(encoding="utf-8")))
    kinds = {name: "DEVICE" if name.startswith("nvmlDevice") else "SYSTEM" for name in sorted(asked - NOT_EXPORTED)}
    return '#include "stubs.h"\n' + "".join(f"{kind}_STUB({name})\n" for name, kind in kinds.items())


def _compile(compiler: str, scratch: Path, stubs: str) -> None:
    generated = scratch / "stubs.c"
    generated.write_text(stubs, encoding="utf-8")
    library = scratch / "lib" / "libnvidia-ml.so.1"
    library.parent.mkdir()
    sources = [*sorted(SOURCES.glob("*.c")), generated]
    command = [compiler, *FLAGS, f"-I{SOURCES}", "-o", str(library), *map(str, sources), *LIBRARIES]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(
            f"the mock NVML library does not compile (are the C headers there? {INSTALL}):\n{done.stderr}"
        )
    library.with_name("libnvidia-ml.so").symlink_to(library.name)


def _publish(built: Path, finished: Path) -> None:
    try:
        os.rename(built, finished)  # noqa: PTH104 - rename onto a full folder must fail, which os.rename promises
    except OSError:
        if not finished.is_dir():  # else another process built the same meanwhile
            raise
