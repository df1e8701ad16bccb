"""Environment variables, and Keras' backend."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from fake_environment import FakeEnvironment, run_rows

from gpuwarden.doctor.frameworks.variable_checks import VARIABLE_CHECKS
from gpuwarden.doctor.model import CheckResult, Context


@pytest.fixture
def environment(tmp_path: Path) -> FakeEnvironment:
    """Return an environment without packages."""
    return FakeEnvironment(tmp_path / "env")


def check(environment: FakeEnvironment, tmp_path: Path, **environ: str) -> dict[str, CheckResult]:
    """Run the checks of variables."""
    return run_rows(VARIABLE_CHECKS, environment.context(tmp_path, environ))


@pytest.mark.parametrize(
    ("name", "value", "bites"),
    [
        ("TF_FORCE_GPU_ALLOW_GROWTH", "true", False),
        ("TF_FORCE_GPU_ALLOW_GROWTH", "True", True),
        ("TF_FORCE_GPU_ALLOW_GROWTH", "1", True),
        ("TF_GPU_ALLOCATOR", "cuda_malloc_async", False),
        ("TF_GPU_ALLOCATOR", "cuda_malloc_asinc", True),
        ("TF_CPP_MIN_LOG_LEVEL", "1", False),
        ("TF_CPP_MIN_LOG_LEVEL", "3", True),
        ("TF_DETERMINISTIC_OPS", "0", False),
        ("TF_DETERMINISTIC_OPS", "1", True),
        ("XLA_FLAGS", "--xla_gpu_enable_latency_hiding_scheduler=true", False),
        ("XLA_FLAGS", "--xla_gpu_cuda_data_dir=/missing", True),
        ("XLA_FLAGS", "--xla_gpu_cuda_data_dir=/usr", False),
        ("XLA_PYTHON_CLIENT_ALLOCATOR", "platform", True),
        ("JAX_PLATFORMS", "cpu", True),
        ("JAX_PLATFORMS", "cuda,cpu", False),
        ("JAX_PLATFORMS", "", False),
        ("CUDA_LAUNCH_BLOCKING", "1", True),
        ("CUDA_LAUNCH_BLOCKING", "0", False),
        ("CUDA_CACHE_DISABLE", "1", True),
        ("NVIDIA_TF32_OVERRIDE", "0", True),
        ("PYTORCH_NO_CUDA_MEMORY_CACHING", "1", True),
        ("LD_PRELOAD", "libtcmalloc.so.4", False),
        ("LD_PRELOAD", "libcudart.so.11.0", True),
    ],
)
def test_a_variable_is_a_warning_at_a_value_that_bites(
    name: str,
    value: str,
    bites: bool,  # noqa: FBT001
    tmp_path: Path,
) -> None:
    """And at a usual value it is only named."""
    (found,) = VARIABLE_CHECKS[0].check(Context(tmp_path, {name: value}, tmp_path))
    assert found.status == ("warn" if bites else "pass")
    assert name in found.found


def test_each_variable_gives_a_result_of_its_own(tmp_path: Path) -> None:
    """Two at once, and two faults of one."""
    environ = {"CUDA_LAUNCH_BLOCKING": "1", "XLA_FLAGS": "--xla_gpu_autotune_level=0 --xla_gpu_cuda_data_dir=/missing"}
    found = list(VARIABLE_CHECKS[0].check(Context(tmp_path, environ, tmp_path)))
    assert [each.found.split()[0] for each in found] == ["XLA_FLAGS", "XLA_FLAGS", "CUDA_LAUNCH_BLOCKING"]


def test_without_variables_there_is_one_result(tmp_path: Path) -> None:
    """It passes."""
    assert [each.status for each in VARIABLE_CHECKS[0].check(Context(tmp_path, {}, tmp_path))] == ["pass"]


def test_tensorflow_compares_with_true_and_false() -> None:
    """The real library says that it could not parse another value, which it compares with these words."""
    origin = find_spec("tensorflow")
    assert origin is not None
    assert origin.origin is not None
    content = (Path(origin.origin).parent / "libtensorflow_framework.so.2").read_bytes()
    assert b"TF_FORCE_GPU_ALLOW_GROWTH environment variable is set but could" in content


def add_keras(environment: FakeEnvironment, version: str = "3.11.0") -> None:
    """Install Keras and the package of its default backend."""
    environment.write("tensorflow/__init__.py")
    environment.add("keras", version)


def test_the_backend_is_read_as_keras_reads_it(environment: FakeEnvironment, tmp_path: Path) -> None:
    """The variable, then the file, then the default."""
    add_keras(environment)
    environment.write("jax/__init__.py")
    environment.write("torch/__init__.py")
    assert "backend tensorflow by the default" in check(environment, tmp_path)["keras.backend"].found
    (tmp_path / ".keras").mkdir()
    (tmp_path / ".keras/keras.json").write_text('{"backend": "jax"}')
    assert "backend jax by " in check(environment, tmp_path)["keras.backend"].found
    found = check(environment, tmp_path, KERAS_BACKEND="torch")["keras.backend"]
    assert (found.status, found.found) == ("pass", "Keras 3.11.0 has the backend torch by KERAS_BACKEND.")
    (tmp_path / ".keras/keras.json").write_text("no json")
    assert "by the default" in check(environment, tmp_path)["keras.backend"].found


@pytest.mark.parametrize(("backend", "status"), [("torch", "fail"), ("theano", "fail"), ("numpy", "warn")])
def test_a_backend_that_does_not_train(environment: FakeEnvironment, tmp_path: Path, backend: str, status: str) -> None:
    """Not installed, unknown, and one without gradients."""
    add_keras(environment)
    environment.write("numpy/__init__.py")
    assert check(environment, tmp_path, KERAS_BACKEND=backend)["keras.backend"].status == status


def test_keras_2_has_one_backend(environment: FakeEnvironment, tmp_path: Path) -> None:
    """The variable is for Keras 3."""
    add_keras(environment, "2.15.0")
    found = check(environment, tmp_path, KERAS_BACKEND="jax")["keras.backend"]
    assert (found.status, found.found) == ("pass", "Keras 2.15.0 on TensorFlow.")


def test_legacy_keras_needs_its_package(environment: FakeEnvironment, tmp_path: Path) -> None:
    """`tf.keras` is Keras 3 without the variable."""
    add_keras(environment)
    found = check(environment, tmp_path, TF_USE_LEGACY_KERAS="1")["keras.backend"]
    assert found.status == "fail"
    environment.write("tf_keras/__init__.py")
    assert check(environment, tmp_path, TF_USE_LEGACY_KERAS="1")["keras.backend"].status == "pass"
