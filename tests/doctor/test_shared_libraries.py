"""Search of CUDA libraries, compared with the dynamic loader's."""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
from fake_environment import FakeEnvironment, compile_library, copy_libraries, machine, run_rows

from gpuwarden.doctor.frameworks.build_checks import BUILD_CHECKS
from gpuwarden.doctor.frameworks.cuda_versions import LIBRARIES
from gpuwarden.doctor.frameworks.elf import DynamicSection, read_dynamic_section
from gpuwarden.doctor.frameworks.environment import read_environment
from gpuwarden.doctor.frameworks.shared_libraries import LibrarySearch
from gpuwarden.doctor.model import CheckResult
from system_parts import needs

NAMES = (*LIBRARIES[12], "libcudnn.so.9")
LOADER = '#include <dlfcn.h>\nvoid *load(void) { return dlopen("libcudnn.so.9", RTLD_NOW); }'
LOAD = """import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
library.load.restype = ctypes.c_void_p
print(bool(library.load()))
print(*(line.split()[-1] for line in open("/proc/self/maps") if "libcudnn" in line), sep="\\n")"""


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeEnvironment:
    """Return an environment with TensorFlow 2.20 for CUDA and NVIDIA's packages, the libraries aside."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    environment = FakeEnvironment(tmp_path / "env")
    environment.add_tensorflow()
    environment.add_wheel("tensorflow-2.20.0", extra="and-cuda")
    folders = ":".join(f"$ORIGIN/../nvidia/{each}/lib" for each in ("cudnn", "cuda"))
    compile_library(environment.site / "tensorflow/libtensorflow_framework.so.2", path=folders)
    return environment


@pytest.fixture
def stub(tmp_path: Path) -> Path:
    """Return a library without content."""
    return compile_library(tmp_path / "stub.so")


def check(environment: FakeEnvironment, tmp_path: Path, variable: str = "") -> CheckResult:
    """Run the check of TensorFlow's libraries."""
    context = environment.context(tmp_path, {"LD_LIBRARY_PATH": variable} if variable else {}, machine("8.0"))
    return run_rows(BUILD_CHECKS[:1], context)["tensorflow.libraries"]


@pytest.mark.parametrize(("is_rpath", "has_variable", "has_own"), list(itertools.product([False, True], repeat=3)))
def test_the_search_finds_what_the_loader_loads(
    tmp_path: Path,
    is_rpath: bool,  # noqa: FBT001
    has_variable: bool,  # noqa: FBT001
    has_own: bool,  # noqa: FBT001
) -> None:
    """LD_LIBRARY_PATH comes before RUNPATH and after RPATH."""
    library = compile_library(
        tmp_path / "pkg/libframework.so", path="$ORIGIN/../nvidia/cudnn/lib", is_rpath=is_rpath, source=LOADER
    )
    if has_own:
        compile_library(tmp_path / "nvidia/cudnn/lib/libcudnn.so.9")
    compile_library(tmp_path / "other/libcudnn.so.9")
    environment = FakeEnvironment(tmp_path / "env")
    context = environment.context(Path("/"), {"LD_LIBRARY_PATH": str(tmp_path / "other")} if has_variable else {})
    command = [str(environment.python), "-c", LOAD, str(library)]
    loaded = subprocess.run(command, env=dict(context.environ), capture_output=True, text=True, check=True)
    expected = {os.path.realpath(each) for each in loaded.stdout.split()[1:]}
    found = LibrarySearch(context, read_environment(context)).find("libcudnn.so.9", read_dynamic_section(library))
    assert ({str(found.path.resolve())} if found else set()) == expected
    assert bool(expected) is (has_own or has_variable)


def test_the_dynamic_section_of_a_file_that_is_no_library(tmp_path: Path) -> None:
    """Text, a file that ends early, and nothing."""
    whole = compile_library(tmp_path / "stub.so").read_bytes()
    for content in (b"", b"#!/bin/sh\n", whole[:100], whole[: len(whole) // 8]):
        (tmp_path / "broken").write_bytes(content)
        assert read_dynamic_section(tmp_path / "broken") == DynamicSection()


def test_the_dynamic_section_is_that_which_readelf_shows(tmp_path: Path) -> None:
    """Needed libraries and both kinds of search path."""
    readelf = needs("readelf", "binutils")
    cudnn = compile_library(tmp_path / "libcudnn.so.9")
    for is_rpath in (False, True):
        file = compile_library(tmp_path / f"{is_rpath}.so", needed=[cudnn], path="$ORIGIN/a:/b", is_rpath=is_rpath)
        section = read_dynamic_section(file)
        text = subprocess.run([readelf, "-d", str(file)], capture_output=True, text=True, check=True).stdout
        assert all(f"[{each}]" in text for each in section.needed)
        assert "libcudnn.so.9" in section.needed
        assert (section.rpath, section.runpath)[not is_rpath] == (tmp_path / "a", Path("/b"))
        assert not (section.rpath, section.runpath)[is_rpath]
        assert ("(RPATH)" in text) is is_rpath


def test_libraries_of_the_wheels_are_found(environment: FakeEnvironment, tmp_path: Path, stub: Path) -> None:
    """The version is that of the package that has them."""
    copy_libraries(stub, environment.site / "nvidia/cuda/lib", NAMES[:-1])
    copy_libraries(stub, environment.site / "nvidia/cudnn/lib", NAMES[-1:])
    found = check(environment, tmp_path)
    assert found.status == "pass"
    assert f"libcudnn.so.9 (9.3.0.75) from {environment.site}/nvidia/cudnn/lib" in found.found
    assert "libcudart.so.12 (12.5.82)" in found.found


def test_a_missing_library_is_named(environment: FakeEnvironment, tmp_path: Path, stub: Path) -> None:
    """TensorFlow then computes on the CPU."""
    copy_libraries(stub, environment.site / "nvidia/cuda/lib", [each for each in NAMES[:-1] if "cufft" not in each])
    copy_libraries(stub, environment.site / "nvidia/cudnn/lib", NAMES[-1:])
    found = check(environment, tmp_path)
    assert found.status == "fail"
    assert found.found == "TensorFlow 2.20.0 needs libraries that are not found: libcufft.so.11."


@pytest.mark.parametrize(("version", "status"), [("9.10.1", "warn"), ("9.1.0", "fail"), ("8.9.7", "fail")])
def test_a_cudnn_of_ld_library_path_replaces_that_of_the_wheel(
    environment: FakeEnvironment, tmp_path: Path, stub: Path, version: str, status: str
) -> None:
    """A newer one may work; an older one than TensorFlow was built with fails."""
    copy_libraries(stub, environment.site / "nvidia/cuda/lib", NAMES[:-1])
    copy_libraries(stub, environment.site / "nvidia/cudnn/lib", NAMES[-1:])
    copy_libraries(stub, tmp_path / "cuda/lib64", [f"libcudnn.so.{version}"])
    (tmp_path / "cuda/lib64/libcudnn.so.9").symlink_to(f"libcudnn.so.{version}")
    found = check(environment, tmp_path, f"/missing:{tmp_path}/cuda/lib64")
    assert found.status == status
    assert version in found.found
    assert found.fix == f"Remove {tmp_path}/cuda/lib64 from LD_LIBRARY_PATH."


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("90501", ("warn", "libcudnn.so.9 (9.5.1) from")),
        ("90000", ("fail", "needs cuDNN 9.3 or newer of that major version and would load 9.0.0")),
        ("", ("fail", "does not load or is no cuDNN")),
    ],
)
def test_a_cudnn_of_ld_library_path_says_its_version_itself(
    environment: FakeEnvironment, tmp_path: Path, stub: Path, answer: str, expected: tuple[str, str]
) -> None:
    """A library without a version in its file name, and of no package."""
    copy_libraries(stub, environment.site / "nvidia/cuda/lib", NAMES[:-1])
    copy_libraries(stub, environment.site / "nvidia/cudnn/lib", NAMES[-1:])
    source = f"unsigned long cudnnGetVersion(void) {{ return {answer}; }}" if answer else ""
    compile_library(tmp_path / "copied/libcudnn.so.9", source=source)
    found = check(environment, tmp_path, str(tmp_path / "copied"))
    assert (found.status, found.fix) == (expected[0], f"Remove {tmp_path}/copied from LD_LIBRARY_PATH.")
    assert expected[1] in found.found


def test_a_cudnn_of_another_environment_has_its_packages_version(
    environment: FakeEnvironment, tmp_path: Path, stub: Path
) -> None:
    """As where LD_LIBRARY_PATH was set for another project."""
    copy_libraries(stub, environment.site / "nvidia/cuda/lib", NAMES[:-1])
    other = FakeEnvironment(tmp_path / "other")
    other.add("nvidia-cudnn-cu12", "9.1.0.70")
    copy_libraries(stub, other.site / "nvidia/cudnn/lib", NAMES[-1:])
    found = check(environment, tmp_path, str(other.site / "nvidia/cudnn/lib"))
    assert found.status == "fail"
    assert "would load 9.1.0.70" in found.found


def test_a_cudnn_of_the_system_is_compared_with_the_pins_too(tmp_path: Path, stub: Path) -> None:
    """TensorFlow without NVIDIA's packages still needs the cuDNN that it was built with."""
    environment = FakeEnvironment(tmp_path / "env")
    environment.add_tensorflow()
    environment.add_wheel("tensorflow-2.20.0")
    compile_library(environment.site / "tensorflow/libtensorflow_framework.so.2")
    copy_libraries(stub, tmp_path / "cuda", [*NAMES[:-1], "libcudnn.so.9.1.0"])
    (tmp_path / "cuda/libcudnn.so.9").symlink_to("libcudnn.so.9.1.0")
    found = check(environment, tmp_path, f"{tmp_path}/cuda")
    assert found.status == "fail"
    assert "needs cuDNN 9.3 or newer of that major version and would load 9.1.0" in found.found


def test_a_cudnn_of_the_system_is_found_in_the_loaders_cache(
    environment: FakeEnvironment, tmp_path: Path, stub: Path
) -> None:
    """As with CUDA from a distribution's packages."""
    for each in NAMES:
        compile_library(tmp_path / "system" / each)
    (tmp_path / "etc").mkdir()
    (tmp_path / "ld.so.conf").write_text(f"{tmp_path}/system\n")
    ldconfig = needs("ldconfig", "libc-bin")
    files = ["-C", str(tmp_path / "etc/ld.so.cache"), "-f", str(tmp_path / "ld.so.conf")]
    subprocess.run([ldconfig, "-X", *files], check=True, capture_output=True)
    found = check(environment, tmp_path)
    assert found.status == "pass"
    assert f"libcudnn.so.9 from {tmp_path}/system" in found.found


def test_ld_library_path_does_not_replace_the_cudnn_of_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch has an RPATH; its libraries are those that its own library needs."""
    monkeypatch.chdir(tmp_path)
    environment = FakeEnvironment(tmp_path / "env")
    environment.write("torch/__init__.py")
    environment.write("torch/version.py", "__version__ = '2.9.1+cu128'\ncuda = '12.8'\nhip = None\n")
    environment.add_wheel("torch-2.9.1")
    own = environment.site / "nvidia/cudnn/lib"
    needed = [compile_library(own / each) for each in ("libcudart.so.12", "libcudnn.so.9")]
    compile_library(
        environment.site / "torch/lib/libtorch_cuda.so",
        needed=needed,
        path="$ORIGIN/../../nvidia/cudnn/lib",
        is_rpath=True,
    )
    compile_library(tmp_path / "other/libcudnn.so.9")
    context = environment.context(tmp_path, {"LD_LIBRARY_PATH": str(tmp_path / "other")}, machine("8.0"))
    found: Mapping[str, CheckResult] = run_rows(BUILD_CHECKS[1:2], context)
    assert found["torch.libraries"].status == "pass"
    assert f"libcudnn.so.9 (9.10.2.21) from {own}" in found["torch.libraries"].found
