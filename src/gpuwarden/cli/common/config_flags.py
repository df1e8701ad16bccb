"""Configuration of a command: the file, the environment, and the flags that override it."""

from __future__ import annotations

import argparse
import os

from gpuwarden.config.loader import load
from gpuwarden.config.schema import Config
from gpuwarden.daemon import log_setup
from gpuwarden.health.conditions import ALERTS

_FLAGS = {
    "source": "--source",
    "web.listen": "--listen",
    "runs.socket": "--socket",
    "control.socket": "--control",
}


def load_config(parsed: argparse.Namespace) -> Config:
    """Read the configuration and set up logging; a flag wins over the environment, that over the file.

    Raises ConfigError.
    """
    overrides, origin = {}, dict(_FLAGS)
    if socket := os.environ.get("GPUWARDEN_SOCKET"):
        overrides["runs.socket"], origin["runs.socket"] = socket, "GPUWARDEN_SOCKET"
    for key, flag in _FLAGS.items():
        value = getattr(parsed, flag.removeprefix("--"), None)
        if value is not None:
            overrides[key], origin[key] = value, flag
    config = load(parsed.config, overrides, origin, ALERTS.keys())
    log_setup.configure(config.log.level)
    return config
