"""gpuwarden: hardware and training runs of one GPU box on one Prometheus endpoint."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpuwarden.client.watch import watch as watch

__all__ = ["watch"]


def __getattr__(name: str) -> Any:
    """Give `watch` to a program that trains; the daemon, which this package also is, never loads it."""
    if name != "watch":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from gpuwarden.client.watch import watch  # noqa: PLC0415 - see above

    return watch
