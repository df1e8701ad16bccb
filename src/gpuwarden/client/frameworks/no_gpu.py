"""Reason why a framework that has begun to compute uses no GPU, from what the process has loaded already.

Nothing here loads a library or sets up a device.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gpuwarden.protocol.messages import NoGpuReason

# Of the kernel module: NVIDIA's container tools mount it with the GPUs; WSL 2 has another.
DRIVER_FILES = ("/dev/nvidiactl", "/dev/dxg")


def find_no_gpu_reason(framework: str, environ: Mapping[str, str] = os.environ) -> NoGpuReason | None:
    """Return why a framework, by its module's name, uses no GPU; None for an unknown one, or another accelerator.

    Call it once the framework has set up its devices, and lists no GPU; torch at any time. Never raises.
    """
    module, check = sys.modules.get(framework), _CHECKS.get(framework)
    try:
        reason = check(module) if module is not None and check is not None else None
    except Exception:  # noqa: BLE001 - another version of the framework; the reason stays unknown
        return None
    if reason not in ("no_library", "unused"):
        return reason
    if _hides_all(environ.get("CUDA_VISIBLE_DEVICES")):
        return "hidden"
    return reason if any(Path(each).exists() for each in DRIVER_FILES) else "no_driver"


def _hides_all(visible: str | None) -> bool:
    """Return whether CUDA has no device: it stops at the first entry that is none (CUDA C++ Programming Guide)."""
    first = None if visible is None else visible.split(",")[0].strip()
    return first is not None and (not first or first.startswith("-"))


def _check_tensorflow(tf: Any) -> NoGpuReason | None:
    if tf.config.get_visible_devices("TPU"):
        return None
    if not (tf.test.is_built_with_cuda() or tf.test.is_built_with_rocm()):
        return "cpu_build"
    return "deselected" if tf.config.list_physical_devices("GPU") else "no_library"


def _check_torch(torch: Any) -> NoGpuReason | None:
    """Check torch without cuda.is_available(), which sets up the driver: processes that fork later could not use it."""
    built = torch.version.cuda is not None or getattr(torch.version, "hip", None) is not None
    return "unused" if built else "cpu_build"


def _check_jax(jax: Any) -> NoGpuReason | None:
    if any(device.platform not in ("cpu", "gpu", "cuda", "rocm") for device in jax.local_devices()):
        return None
    bridge = sys.modules.get("jax._src.xla_bridge")
    if not {"cuda", "rocm"} & set(getattr(bridge, "_backend_factories", ())):  # a plugin of its own has them
        return "cpu_build"
    platforms = str(jax.config.jax_platforms or "")
    return "deselected" if platforms and not {"cuda", "gpu", "rocm"} & set(platforms.split(",")) else "no_library"


_CHECKS: Mapping[str, Callable[[Any], NoGpuReason | None]] = {
    "tensorflow": _check_tensorflow,
    "torch": _check_torch,
    "jax": _check_jax,
}
