"""Training environments with a real interpreter and the real metadata of wheels, but no framework."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Mapping, Sequence
from dataclasses import replace
from email import message_from_string
from pathlib import Path

from packaging.requirements import Requirement

from gpuwarden.doctor.model import CheckResult, CheckRow, Context
from gpuwarden.gpu.snapshot import Snapshot
from gpuwarden.nvml.session import DriverVersions
from snapshots import gpu, snapshot
from system_parts import needs

WHEELS = Path(__file__).parents[1] / "doctor/wheels"  # header lines of METADATA, as on PyPI in November 2026
# The literal of the module in the wheel of TensorFlow 2.20.0, and in that of tensorflow-cpu.
CUDA_BUILD = (
    "import collections\n\nbuild_info = collections.OrderedDict([('cpu_compiler', 'clang'), "
    "('cuda_compute_capabilities', ['sm_60', 'sm_70', 'sm_80', 'sm_89', 'compute_90']), ('cuda_version', '12.5.1'), "
    "('cudnn_version', '9'), ('is_cuda_build', True), ('is_rocm_build', False), ('is_tensorrt_build', False)])\n"
)
CPU_BUILD = (
    "import collections\n\nbuild_info = collections.OrderedDict([('is_cuda_build', False), ('is_rocm_build', False), "
    "('is_tensorrt_build', False)])\n"
)


class FakeEnvironment:
    """A virtual environment whose site-packages a test fills."""

    def __init__(self, folder: Path) -> None:
        venv.EnvBuilder(with_pip=False, symlinks=True).create(folder)
        self.folder = folder
        self.python = folder / "bin/python"
        (self.site,) = folder.glob("lib/python*/site-packages")

    def write(self, path: str, text: str = "") -> Path:
        """Write a file below site-packages."""
        file = self.site / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file

    def add(self, name: str, version: str, metadata: str = "") -> None:
        """Add the metadata of a distribution."""
        text = metadata or f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        self.write(f"{name.replace('-', '_')}-{version}.dist-info/METADATA", text)

    def add_wheel(
        self, wheel: str, *, extra: str = "", without: Sequence[str] = (), versions: Mapping[str, str] | None = None
    ) -> None:
        """Add a wheel's metadata, and that of all it requires: the lowest versions, or those of `versions`."""
        name, _, version = wheel.rpartition("-")
        text = (WHEELS / f"{wheel}.METADATA").read_text()
        self.add(name, version, text)
        for each in message_from_string(text).get_all("Requires-Dist", []):
            requirement = Requirement(each)
            if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
                continue
            if requirement.name not in without:
                lowest = [one.version for one in requirement.specifier if one.operator in (">=", "==", "~=")]
                self.add(requirement.name, (versions or {}).get(requirement.name, (lowest or ["1.0"])[0]))

    def add_tensorflow(self, build: str = CUDA_BUILD) -> None:
        """Add the files of TensorFlow that the doctor reads, the library aside."""
        self.write("tensorflow/__init__.py")
        self.write("tensorflow/python/platform/build_info.py", build)

    def context(self, root: Path, environ: Mapping[str, str] | None = None, polled: Snapshot | None = None) -> Context:
        """Return the context of this environment on a machine of files."""
        variables = {"PATH": os.environ["PATH"], "HOME": str(root), **(environ or {})}
        return Context(self.python, variables, root, survey=lambda: polled or Snapshot(0.0, 0.0, "library_not_found"))


def run_rows(rows: Sequence[CheckRow], context: Context) -> dict[str, CheckResult]:
    """Run checks and return their results by name; of several with one name the last."""
    return {each.name: each for row in rows for each in row.check(context)}


def machine(*capabilities: str, driver: str = "590.48.01", cuda: str = "13.1") -> Snapshot:
    """Return the poll of a machine with a GPU for each compute capability."""
    gpus = [
        replace(each, identity=replace(each.identity, compute_capability=capability))
        for each, capability in ((gpu(index, name=f"GPU-{one}"), one) for index, one in enumerate(capabilities))
    ]
    return replace(snapshot(*gpus), driver=DriverVersions(driver, cuda))


def compile_library(
    file: Path, *, needed: Sequence[Path] = (), path: str = "", is_rpath: bool = False, source: str = ""
) -> Path:
    """Compile a shared library whose name is that of the file, with a search path of its own."""
    file.parent.mkdir(parents=True, exist_ok=True)
    tags = ["-Wl,--disable-new-dtags" if is_rpath else "-Wl,--enable-new-dtags", f"-Wl,-rpath,{path}"] if path else []
    file.write_bytes(_compile(file.name, (*tags, "-Wl,--no-as-needed", *map(str, needed)), source))
    file.chmod(0o755)
    return file


@functools.cache
def _compile(name: str, options: tuple[str, ...], source: str) -> bytes:
    command = [needs("gcc", "gcc libc6-dev"), "-shared", "-fPIC", "-x", "c", "-", "-x", "none", f"-Wl,-soname,{name}"]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, name)
        subprocess.run([*command, "-o", str(file), *options], input=source, text=True, check=True)
        return file.read_bytes()


def copy_libraries(stub: Path, folder: Path, names: Sequence[str]) -> None:
    """Put a library under several names: those that only have to exist."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        shutil.copy(stub, folder / name)


def real_python() -> Path:
    """Return the interpreter of these tests, which has the real TensorFlow."""
    return Path(sys.executable)
