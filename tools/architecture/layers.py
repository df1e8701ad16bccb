"""Layers of the package: the one table that the architecture tests and the map read.

A module imports from its own layer or a lower one of the same side. The client's side runs inside the training process
and shares only `protocol` and `errors` with the daemon's.
"""

from __future__ import annotations

from typing import NamedTuple

ROOT = "gpuwarden"


class Layer(NamedTuple):
    """One row of the map."""

    title: str
    parts: tuple[str, ...]  # packages with their subpackages, and modules at the top


# From the bottom up.
DAEMON_LAYERS = (
    Layer(
        "Foundation",
        ("_version", "protocol", "errors", "config", "metrics", "formatting", "fairness", "severity"),
    ),
    Layer("Machine and driver", ("host", "nvml")),
    Layer("GPUs and analysis", ("gpu", "xid", "owners", "analysis")),
    Layer("Runs; other sources", ("runs", "capture")),
    Layer("Derived from runs", ("usage", "pressure", "records")),
    Layer("One poll", ("state",)),
    Layer("Health and history", ("health", "history", "incidents", "advice")),
    Layer("Outputs", ("alerts", "dcgm", "doctor", "explain", "fitness", "web")),
    Layer("Daemon", ("daemon",)),
    Layer("Entry points", ("cli", "launcher", "demo", "collector", "__main__")),
)
CLIENT_LAYERS = (
    Layer("Foundation", ("_version", "protocol", "errors")),
    Layer("Client", ("client",)),
    Layer("Tuning", ("tuning",)),
    Layer("Facades", ("keras", "__init__")),  # `gpuwarden.keras`, and `gpuwarden` itself with `watch`
    Layer("Demonstration", ("demo",)),  # on both sides: a daemon, and a training that reports to it
)


def part_of(module: str) -> str:
    """Return the part that a module belongs to, by its full name: a package or a module at the top."""
    return "__init__" if module == ROOT else module.removeprefix(f"{ROOT}.").partition(".")[0]


def layer_of(module: str, layers: tuple[Layer, ...]) -> int | None:
    """Return the number of the layer that a module belongs to; None if it is of the other side."""
    part = part_of(module)
    return next((number for number, layer in enumerate(layers) if part in layer.parts), None)


def may_import(importer: str, imported: str) -> bool:
    """Return whether the layers allow an import of one module by another."""
    for layers in (DAEMON_LAYERS, CLIENT_LAYERS):
        own, other = layer_of(importer, layers), layer_of(imported, layers)
        if own is not None and other is not None and other <= own:
            return True
    return False
