"""Reason why a framework uses no GPU, for builds that this machine has no GPU to run."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpuwarden.client.frameworks import no_gpu
from gpuwarden.client.frameworks.no_gpu import find_no_gpu_reason


def tensorflow(*, built: bool = True, gpus: int = 0, tpus: int = 0) -> Any:
    """Make a TensorFlow with these physical GPUs, none of them visible."""
    config = SimpleNamespace(
        get_visible_devices=lambda kind: [kind] * tpus, list_physical_devices=lambda kind: [kind] * gpus
    )
    test = SimpleNamespace(is_built_with_cuda=lambda: built, is_built_with_rocm=lambda: False)
    return SimpleNamespace(config=config, test=test)


@pytest.mark.parametrize(
    ("module", "environ", "has_driver", "expected"),
    [
        (tensorflow(built=False), {"CUDA_VISIBLE_DEVICES": ""}, True, "cpu_build"),
        (tensorflow(gpus=2), {}, True, "deselected"),
        (tensorflow(tpus=1), {}, True, None),
        (tensorflow(), {"CUDA_VISIBLE_DEVICES": ""}, True, "hidden"),
        (tensorflow(), {"CUDA_VISIBLE_DEVICES": "-1"}, False, "hidden"),
        (tensorflow(), {"CUDA_VISIBLE_DEVICES": " -1,0"}, True, "hidden"),
        (tensorflow(), {"CUDA_VISIBLE_DEVICES": "0"}, True, "no_library"),
        (tensorflow(), {}, False, "no_driver"),
        (tensorflow(), {}, True, "no_library"),
        (SimpleNamespace(), {}, True, None),  # another version: the reason stays unknown
    ],
)
def test_tensorflow(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    module: Any,
    environ: dict[str, str],
    *,
    has_driver: bool,
    expected: str | None,
) -> None:
    """The first reason that explains it is given: build, environment, choice, driver, library."""
    monkeypatch.setitem(sys.modules, "tensorflow", module)
    driver = tmp_path / "nvidiactl"
    monkeypatch.setattr(no_gpu, "DRIVER_FILES", (str(driver),))
    if has_driver:
        driver.touch()
    assert find_no_gpu_reason("tensorflow", environ) == expected


@pytest.mark.parametrize(
    ("cuda", "environ", "expected"),
    [(None, {}, "cpu_build"), ("13", {}, "unused"), ("13", {"CUDA_VISIBLE_DEVICES": "-1"}, "hidden")],
)
def test_torch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cuda: str | None, environ: dict[str, str], expected: str
) -> None:
    """Torch is not asked for its devices, as that would set up the driver: with CUDA it has put nothing on a GPU."""
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(version=SimpleNamespace(cuda=cuda)))
    (tmp_path / "nvidiactl").touch()
    monkeypatch.setattr(no_gpu, "DRIVER_FILES", (str(tmp_path / "nvidiactl"),))
    assert find_no_gpu_reason("torch", environ) == expected


@pytest.mark.parametrize(
    ("platform", "factories", "chosen", "expected"),
    [
        ("cpu", ["cpu", "tpu"], None, "cpu_build"),
        ("cpu", ["cpu", "cuda"], "cpu", "deselected"),
        ("cpu", ["cpu", "cuda"], None, "no_library"),
        ("cpu", ["cpu", "cuda"], "cuda,cpu", "no_library"),
        ("tpu", ["cpu", "tpu"], None, None),
    ],
)
def test_jax(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    platform: str,
    factories: list[str],
    *,
    chosen: str | None,
    expected: str | None,
) -> None:
    """JAX's GPUs come with a plugin; JAX_PLATFORMS can leave them out."""
    devices = [SimpleNamespace(platform=platform)]
    jax = SimpleNamespace(local_devices=lambda: devices, config=SimpleNamespace(jax_platforms=chosen))
    monkeypatch.setitem(sys.modules, "jax", jax)
    bridge = SimpleNamespace(_backend_factories=dict.fromkeys(factories))
    monkeypatch.setitem(sys.modules, "jax._src.xla_bridge", bridge)
    (tmp_path / "nvidiactl").touch()
    monkeypatch.setattr(no_gpu, "DRIVER_FILES", (str(tmp_path / "nvidiactl"),))
    assert find_no_gpu_reason("jax", {}) == expected


def test_unknown_framework() -> None:
    """Plain Python has no reason."""
    assert find_no_gpu_reason("python", {}) is None
