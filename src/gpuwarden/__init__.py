"""gpuwarden: a Prometheus exporter for NVIDIA GPUs that also knows the training runs on them."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpuwarden.client.watch import watch as watch

__all__ = ["watch"]


def __getattr__(name: str) -> Any:
    """Load `watch` on first use: the daemon, which is in the same package, does not need it."""
    if name != "watch":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from gpuwarden.client.watch import watch  # noqa: PLC0415 - see above

    return watch
