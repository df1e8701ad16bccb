"""gpuwarden: a Prometheus exporter for NVIDIA GPUs that also knows the training runs on them."""

from __future__ import annotations

TYPE_CHECKING = False  # typing is not imported: see __main__.py
if TYPE_CHECKING:
    from typing import Any

    from gpuwarden.client.watch import watch as watch
    from gpuwarden.tuning.function_retry import with_oom_retry as with_oom_retry

__all__ = ["watch", "with_oom_retry"]

_MODULES = {"watch": "gpuwarden.client.watch", "with_oom_retry": "gpuwarden.tuning.function_retry"}


def __getattr__(name: str) -> Any:
    """Load a function of the API on first use: the daemon, which is in the same package, needs none of them."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module  # noqa: PLC0415 - likewise

    return getattr(import_module(_MODULES[name]), name)
