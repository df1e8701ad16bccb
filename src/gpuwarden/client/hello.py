"""Hello message of this process: name, place in its job, devices, and the CUDA variables that select them."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from gpuwarden.client.distributed.job_place import read_job_place
from gpuwarden.protocol.messages import MAX_DEVICE_LIST_CHARACTERS, MAX_FOLDER_CHARACTERS, Hello, NoGpuReason
from gpuwarden.protocol.run_folder import FOLDER_VARIABLE, NAME_VARIABLE
from gpuwarden.protocol.validators import clip


def make_hello(
    name: str | None, framework: str, devices: Mapping[str, str | None], no_gpu: NoGpuReason | None = None
) -> Hello:
    """Return the hello of this process; `name` is by default its script's. Never raises."""
    place = read_job_place(os.environ)
    return Hello(
        name=clip((name or "").strip() or find_default_name()),
        framework=clip(framework),
        devices={clip(device): gpu and clip(gpu) for device, gpu in devices.items()},
        visible_devices=_read_variable("CUDA_VISIBLE_DEVICES"),
        device_order=_read_variable("CUDA_DEVICE_ORDER"),
        job=place.job,
        rank=place.rank,
        world_size=place.world_size,
        hears=True,
        mps_memory_limit=_read_variable("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT") if _has_mps() else None,
        no_gpu=no_gpu,
        run_folder=_read_run_folder(),
    )


def _read_run_folder() -> str | None:
    folder = os.environ.get(FOLDER_VARIABLE, "")
    return folder if 0 < len(folder) <= MAX_FOLDER_CHARACTERS and folder.isprintable() else None


def _has_mps() -> bool:
    """Return whether an MPS control daemon has its directory here: without one, its variables have no effect."""
    return Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps").is_dir()  # noqa: S108 - CUDA's default


def find_default_name() -> str:
    """Return the name that `gpuwarden run` was given, else that of this process's script or notebook."""
    if given := os.environ.get(NAME_VARIABLE, "").strip():
        return given
    script = Path(sys.argv[0] if getattr(sys, "argv", None) else "").name
    if "ipykernel" in script or "colab_kernel" in script:
        notebook = Path(os.environ.get("JPY_SESSION_NAME", "")).name  # set by some Jupyter servers
        return notebook if notebook.endswith(".ipynb") else "notebook"
    return "python" if script in ("", "-c", "-") else script


def _read_variable(variable: str) -> str | None:
    """Read a variable; cut a list that is too long between two entries: half an index would be another GPU."""
    value = os.environ.get(variable)
    if value is not None and len(value) > MAX_DEVICE_LIST_CHARACTERS:
        value = value[:MAX_DEVICE_LIST_CHARACTERS].rpartition(",")[0]
    return None if value is None else clip(value, MAX_DEVICE_LIST_CHARACTERS)
