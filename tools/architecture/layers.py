"""Layers of the package: the one table that the architecture tests and the map read.

A module imports from its own layer or a lower one of the same side. The client's side runs inside the training process
and shares only `protocol` with the daemon's.
"""

from __future__ import annotations

ROOT = "gpuwarden"

# From the bottom up. A name stands for a package with its subpackages, or for a module at the top.
DAEMON_LAYERS: tuple[tuple[str, ...], ...] = (
    ("_version", "protocol", "config", "metrics", "formatting", "log_limiter", "rate_limit", "fair_eviction"),
    ("host", "nvml"),
    ("gpu", "xid", "owners", "analysis"),
    ("runs", "simulation", "capture"),
    ("usage", "pressure", "advice", "records"),
    ("state",),
    ("health", "history"),
    ("alerts", "dcgm", "web"),
    ("daemon",),
    ("cli", "demo", "collector", "__main__"),
)
CLIENT_LAYERS: tuple[tuple[str, ...], ...] = (
    ("_version", "protocol"),
    ("client",),
    ("tuning",),
    ("keras", "__init__"),  # facades: `gpuwarden.keras`, and `gpuwarden` with `watch`
    ("demo",),  # on both sides: a daemon, and a training that reports to it
)


def layer_of(module: str, layers: tuple[tuple[str, ...], ...]) -> int | None:
    """Return the number of the layer that a module belongs to, by its full name; None if it is of the other side."""
    part = module.removeprefix(f"{ROOT}.").partition(".")[0] if module != ROOT else "__init__"
    return next((number for number, parts in enumerate(layers) if part in parts), None)


def may_import(importer: str, imported: str) -> bool:
    """Return whether the layers allow an import of one module by another."""
    for layers in (DAEMON_LAYERS, CLIENT_LAYERS):
        own, other = layer_of(importer, layers), layer_of(imported, layers)
        if own is not None and other is not None and other <= own:
            return True
    return False
