"""The real driver through nvidia-ml-py, and why it may have nothing to show."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import cast

import pynvml

from gpuwarden.gpu.advice import hidden_gpus
from gpuwarden.gpu.nvml import FUNCTIONS, Nvml
from gpuwarden.sources.older_forms import older_forms

LEAST_VERSION = "12.570.86"  # the first nvidia-ml-py with nvmlDeviceGetMarginTemperature, our newest function
PATIENCE_SECONDS = 10.0


def binding(module: object = pynvml) -> Nvml:
    """Return nvidia-ml-py's functions. Raises ImportError where it lacks a function: too old, or another package's."""
    missing = [name for name in FUNCTIONS if not hasattr(module, name)]
    if missing:
        origin = getattr(module, "__file__", "of unknown origin")
        raise ImportError(
            f"the Python module pynvml ({origin}) lacks {', '.join(missing)}: "
            f"install nvidia-ml-py>={LEAST_VERSION}, and remove the deprecated package named pynvml if it is there"
        )
    functions = {name: getattr(module, name) for name in FUNCTIONS}
    functions |= older_forms(module)
    return cast("Nvml", SimpleNamespace(**functions))


def why_unusable(nvml: Nvml, patience: float = PATIENCE_SECONDS) -> str | None:
    """Tell why the driver shows no GPU, None when it does. Blocks for `patience` seconds where the driver hangs."""
    reasons: list[str | None] = []

    def ask() -> None:
        try:
            nvml.nvmlInit()
            try:
                count = nvml.nvmlDeviceGetCount()
            finally:
                nvml.nvmlShutdown()  # as NVML counts, what is left initialised here could never be let go of
        except Exception as error:  # noqa: BLE001 - whatever goes wrong in there is the answer
            reasons.append(str(error) or type(error).__name__)
        else:
            reasons.append(None if count else hidden_gpus(count) or "the driver lists no GPU")

    # A thread of its own: one that hangs in the driver cannot be ended and must not keep the process from ending.
    asking = threading.Thread(target=ask, name="driver-probe", daemon=True)
    asking.start()
    asking.join(patience)
    return reasons[0] if reasons else f"the driver has not answered for {patience:g} s"
