"""A framework's build: against the driver, the GPUs, and the packages that it requires."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from fake_environment import (
    CPU_BUILD,
    CUDA_BUILD,
    WHEELS,
    FakeEnvironment,
    compile_library,
    machine,
    real_python,
    run_rows,
)

from gpuwarden.doctor.frameworks.build_checks import BUILD_CHECKS
from gpuwarden.doctor.frameworks.builds import read_torch
from gpuwarden.doctor.frameworks.cuda_versions import find_kernels
from gpuwarden.doctor.frameworks.environment import read_environment
from gpuwarden.doctor.model import CheckResult, Context
from gpuwarden.gpu.snapshot import Snapshot

TORCH_TARGETS = 'const char *flags(void) { return "sm_75 sm_80 sm_86 sm_90 sm_100 sm_120"; }'  # as in torch 2.14.1


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeEnvironment:
    """Return an environment without packages; the working folder is empty."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return FakeEnvironment(tmp_path / "env")


def check(environment: FakeEnvironment, tmp_path: Path, polled: Snapshot | None = None) -> Mapping[str, CheckResult]:
    """Run the checks of builds."""
    return run_rows(BUILD_CHECKS, environment.context(tmp_path, polled=polled))


def install_torch(
    environment: FakeEnvironment, wheel: str, cuda: str, versions: Mapping[str, str] | None = None
) -> None:
    """Add the files of torch that the doctor reads, and what it requires."""
    environment.write("torch/__init__.py")
    version = wheel.rpartition("-")[2]
    lines = ["from typing import Optional", f"__version__ = '{version}+cu'", f"cuda: Optional[str] = '{cuda}'"]
    environment.write("torch/version.py", "\n".join([*lines, "hip: Optional[str] = None", ""]))
    environment.add_wheel(wheel, versions=versions)


def test_a_build_for_the_cpu_is_a_failure_where_there_is_a_gpu(environment: FakeEnvironment, tmp_path: Path) -> None:
    """TensorFlow says nothing about it itself."""
    environment.add_tensorflow(CPU_BUILD)
    environment.add("tensorflow_cpu", "2.20.0")
    found = check(environment, tmp_path, machine("9.0"))["tensorflow.build"]
    assert found.status == "fail"
    assert "TensorFlow 2.20.0 is a build for the CPU only" in found.found
    assert "uninstall -y tensorflow-cpu" in found.fix
    assert "install 'tensorflow[and-cuda]==2.20.0'" in found.fix
    assert check(environment, tmp_path)["tensorflow.build"].status == "warn"


def test_a_gpu_that_does_not_answer_is_a_gpu(environment: FakeEnvironment, tmp_path: Path) -> None:
    """Its device node is enough."""
    environment.add_tensorflow(CPU_BUILD)
    environment.add("tensorflow_cpu", "2.20.0")
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").touch()
    assert check(environment, tmp_path)["tensorflow.build"].status == "fail"


def test_the_facts_of_a_build_for_cuda(environment: FakeEnvironment, tmp_path: Path) -> None:
    """From the wheel's own file."""
    environment.add_tensorflow()
    environment.add_wheel("tensorflow-2.20.0", extra="and-cuda")
    results = check(environment, tmp_path, machine("8.9"))
    expected = "TensorFlow 2.20.0 is built with CUDA 12.5.1, cuDNN 9, kernels for sm_60 sm_70 sm_80 sm_89 compute_90."
    assert results["tensorflow.build"].found == expected
    assert results["tensorflow.packages"].status == "pass"
    assert results["tensorflow.driver"].status == "pass"
    assert results["tensorflow.gpus"].status == "pass"


@pytest.mark.parametrize(
    ("capability", "kernels"),
    [
        ("5.2", "too_old"),
        ("6.1", "binary"),
        ("7.5", "binary"),
        ("8.6", "binary"),
        ("8.9", "binary"),
        ("9.0", "ptx"),
        ("12.0", "ptx"),
    ],
)
def test_kernels_of_tensorflow_by_gpu(capability: str, kernels: str) -> None:
    """Its builds from 2.16 on have no binary for Hopper and Blackwell, and nothing for Maxwell."""
    major, minor = capability.split(".")
    assert find_kernels(("sm_60", "sm_70", "sm_80", "sm_89", "compute_90"), (int(major), int(minor))) == kernels


def test_kernels_without_ptx_and_with_letters() -> None:
    """A newer GPU than any binary has none; `a` is for one capability, `f` for the family."""
    assert find_kernels(("sm_75", "sm_90"), (10, 0)) == "too_new"
    assert find_kernels(("sm_90a",), (9, 0)) == "binary"
    assert find_kernels(("sm_100a",), (10, 3)) == "too_new"
    assert find_kernels(("sm_100f",), (10, 3)) == "binary"
    assert find_kernels(("sm_75", "compute_90a"), (10, 0)) == "too_new"


@pytest.mark.parametrize(
    ("capability", "driver", "cuda", "statuses"),
    [
        ("8.0", "590.48.01", "13.1", ("pass", "pass")),
        ("8.0", "535.104.05", "12.2", ("pass", "pass")),  # minor version compatibility: there is a binary
        ("9.0", "535.104.05", "12.2", ("fail", "warn")),  # only PTX, of a newer CUDA
        ("9.0", "555.42.02", "12.5", ("pass", "warn")),
        ("8.0", "470.82.01", "11.4", ("fail", "pass")),
        ("5.2", "590.48.01", "13.1", ("pass", "fail")),
    ],
)
def test_driver_and_gpus_of_tensorflow(
    tmp_path: Path, capability: str, driver: str, cuda: str, statuses: tuple[str, str]
) -> None:
    """TensorFlow 2.20 is built with CUDA 12.5."""
    environment = FakeEnvironment(tmp_path / "env")
    environment.add_tensorflow()
    environment.add_wheel("tensorflow-2.20.0", extra="and-cuda")
    results = check(environment, tmp_path, machine(capability, driver=driver, cuda=cuda))
    assert (results["tensorflow.driver"].status, results["tensorflow.gpus"].status) == statuses
    if statuses[0] == "fail":
        needed = "555.42.02" if capability == "9.0" else "525.60.13"
        assert results["tensorflow.driver"].fix.startswith(f"Install the driver {needed} or newer")


def test_without_a_driver_driver_and_gpus_are_skipped(environment: FakeEnvironment, tmp_path: Path) -> None:
    """Nothing is guessed."""
    environment.add_tensorflow()
    environment.add_wheel("tensorflow-2.20.0", extra="and-cuda")
    results = check(environment, tmp_path)
    assert results["tensorflow.driver"].status == results["tensorflow.gpus"].status == "skip"


def test_all_gpus_are_checked(environment: FakeEnvironment, tmp_path: Path) -> None:
    """One that the build cannot use among others that it can."""
    environment.add_tensorflow()
    environment.add_wheel("tensorflow-2.20.0", extra="and-cuda")
    found = check(environment, tmp_path, machine("8.0", "5.2"))["tensorflow.gpus"]
    assert found.status == "fail"
    assert "GPU-5.2 (sm_52): the GPU is too old" in found.found
    assert "8.0" not in found.found


@pytest.mark.parametrize("wheel", ["tensorflow-2.12.1", "tensorflow-2.17.1", "tensorflow-2.20.0"])
def test_requirements_of_each_spelling_are_met(environment: FakeEnvironment, tmp_path: Path, wheel: str) -> None:
    """`name (>=1)`, `name >=1` and `name>=1`."""
    environment.add_tensorflow()
    environment.add_wheel(wheel, extra="and-cuda", versions={"typing-extensions": "4.5.0"})
    assert check(environment, tmp_path)["tensorflow.packages"].status == "pass"


def test_a_package_of_cuda_that_is_missing_is_a_failure(environment: FakeEnvironment, tmp_path: Path) -> None:
    """If others of the same extra are installed."""
    environment.add_tensorflow()
    environment.add_wheel("tensorflow-2.20.0", extra="and-cuda", without=["nvidia-cudnn-cu12"])
    found = check(environment, tmp_path)["tensorflow.packages"]
    assert found.status == "fail"
    assert "nvidia-cudnn-cu12<10.0,>=9.3.0.75 (missing)" in found.found
    assert "pip install 'nvidia-cudnn-cu12<10.0,>=9.3.0.75'" in found.fix


def test_without_any_package_of_cuda_none_is_required(environment: FakeEnvironment, tmp_path: Path) -> None:
    """CUDA may be the system's; the check of libraries says if it is not."""
    environment.add_tensorflow()
    environment.add_wheel("tensorflow-2.20.0")
    results = check(environment, tmp_path, machine("8.0"))
    assert results["tensorflow.packages"].status == "pass"
    assert results["tensorflow.libraries"].status == "fail"
    assert "libcudnn.so.9" in results["tensorflow.libraries"].found
    assert results["tensorflow.libraries"].fix.endswith("install 'tensorflow[and-cuda]==2.20.0'")


@pytest.mark.parametrize(
    ("name", "version", "status"),
    [
        ("nvidia-cublas-cu12", "12.8.4.1", "warn"),  # torch's pin next to TensorFlow's
        ("nvidia-cudnn-cu12", "9.10.2.21", "fail"),  # another major version than 8.9.7.29
        ("numpy", "2.1.3", "fail"),
        ("wrapt", "1.0", "warn"),
        ("setuptools", "1.0", "pass"),
    ],
)
def test_a_version_beside_the_requirement(
    environment: FakeEnvironment, tmp_path: Path, name: str, version: str, status: str
) -> None:
    """Another major version of what a framework is compiled against fails, anything else may work."""
    environment.add_tensorflow()
    environment.add_wheel("tensorflow-2.17.1", extra="and-cuda", versions={name: version})
    found = check(environment, tmp_path)["tensorflow.packages"]
    assert found.status == status
    assert status == "pass" or f"({version})" in found.found


def test_pins_of_torch_through_the_metapackage_of_cuda(environment: FakeEnvironment, tmp_path: Path) -> None:
    """From 2.14 on torch requires `cuda-toolkit[cublas,...]`, whose extras pin NVIDIA's packages."""
    install_torch(environment, "torch-2.14.1", "13.0", versions={"cuda-toolkit": "13.0.3"})
    environment.add("cuda-toolkit", "13.0.3", (WHEELS / "cuda-toolkit-13.0.3.0.METADATA").read_text())
    environment.add("nvidia-cublas", "13.2.0.9")
    environment.add("nvidia-cuda-nvrtc", "13.0.88")
    found = check(environment, tmp_path)["torch.packages"]
    assert found.status == "fail"
    assert "nvidia-cublas==13.1.1.3.* (13.2.0.9)" in found.found
    assert "nvidia-cuda-runtime==13.0.96.* (missing)" in found.found
    assert "nvrtc" not in found.found


def test_many_missing_packages_are_installed_by_one_requirement(environment: FakeEnvironment, tmp_path: Path) -> None:
    """As where torch was copied without its packages; each requirement is named once."""
    environment.write("torch/__init__.py")
    environment.write("torch/version.py", "__version__ = '2.9.1+cu128'\ncuda = '12.8'\nhip = None\n")
    text = (WHEELS / "torch-2.9.1.METADATA").read_text()
    environment.add("torch", "2.9.1", text + "Requires-Dist: filelock\n")
    found = check(environment, tmp_path)["torch.packages"]
    assert found.status == "fail"
    assert found.found.count("filelock") == 1
    assert "16 more" in found.found
    assert found.fix.endswith("-m pip install 'torch==2.9.1'")


def test_the_gpus_of_torch_are_read_from_its_library(environment: FakeEnvironment, tmp_path: Path) -> None:
    """Torch has them in no file of text."""
    install_torch(environment, "torch-2.9.1", "12.8")
    compile_library(environment.site / "torch/lib/libtorch_python.so", source=TORCH_TARGETS)
    results = check(environment, tmp_path, machine("12.0"))
    assert "kernels for sm_75 sm_80 sm_86 sm_90 sm_100 sm_120" in results["torch.build"].found
    assert results["torch.gpus"].status == "pass"
    assert check(environment, tmp_path, machine("7.0"))["torch.gpus"].status == "fail"


def test_torch_for_rocm(environment: FakeEnvironment, tmp_path: Path) -> None:
    """It cannot use an NVIDIA GPU."""
    install_torch(environment, "torch-2.9.1", "")
    environment.write("torch/version.py", "__version__ = '2.9.1+rocm6.4'\ncuda = None\nhip = '6.4.43482'\n")
    assert "a build for ROCm" in check(environment, tmp_path)["torch.build"].found


def test_the_real_torch_has_no_gpus(tmp_path: Path) -> None:
    """The one of these tests is for the CPU."""
    context = Context(real_python(), {}, tmp_path)
    build = read_torch(read_environment(context), context)
    assert build is None or (build.cuda == () and build.targets == ())


def test_jax_without_its_plugin_is_for_the_cpu(environment: FakeEnvironment, tmp_path: Path) -> None:
    """Jaxlib alone has no GPU."""
    environment.write("jax/__init__.py")
    environment.add("jax", "0.7.2")
    found = check(environment, tmp_path, machine("9.0"))["jax.build"]
    assert found.status == "fail"
    assert found.fix.endswith("pip install 'jax[cuda12]==0.7.2'")


def test_jax_with_its_plugin(environment: FakeEnvironment, tmp_path: Path) -> None:
    """Its versions come from its own module, run alone in a process."""
    environment.write("jax/__init__.py")
    environment.add("jax", "0.7.2")
    environment.add_wheel("jax-cuda12-plugin-0.7.2", extra="with-cuda", versions={"nvidia-cudnn-cu12": "9.1.0.70"})
    environment.write("jax_cuda12_plugin/version.py")  # as in the wheel, which has no __init__.py
    versions = "def cuda_runtime_build_version(): return 12090\ndef cudnn_build_version(): return 90800\n"
    environment.write("jax_cuda12_plugin/_versions.py", versions)
    results = check(environment, tmp_path, machine("9.0", driver="535.104.05", cuda="12.2"))
    assert results["jax.build"].found == "JAX 0.7.2 is built with CUDA 12.9, cuDNN 9.8.0."
    assert results["jax.driver"].status == "pass"  # it has ptxas, and needs no PTX of the driver
    assert "nvidia-cudnn-cu12<10.0,>=9.8 (9.1.0.70)" in results["jax.packages"].found


def test_a_build_info_of_another_form_is_no_build_for_cuda(environment: FakeEnvironment, tmp_path: Path) -> None:
    """A later TensorFlow may write it in another way."""
    environment.add_tensorflow(CUDA_BUILD.replace("'clang'", "compiler()"))
    environment.add_wheel("tensorflow-2.20.0")
    assert "tensorflow.build" in check(environment, tmp_path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("build_info = collections.OrderedDict([('is_cuda_bu", "cannot be read"),
        ("", "does not say what TensorFlow is built for"),
        ("a = b('x')", "does not say what TensorFlow is built for"),
        ("\0\0\0", "cannot be read"),
    ],
)
def test_damaged_build_file_is_named(environment: FakeEnvironment, tmp_path: Path, content: str, said: str) -> None:
    """A file cut by a full disk is a damaged installation, no build for the CPU, and no fault of the doctor."""
    environment.add_tensorflow(content)
    environment.add("tensorflow", "2.20.0")
    found = check(environment, tmp_path, machine("9.0"))["tensorflow.build"]
    assert found.status == "fail"
    assert "build_info.py" in found.found
    assert said in found.found
    assert found.fix.endswith("-m pip install --force-reinstall --no-deps tensorflow")
