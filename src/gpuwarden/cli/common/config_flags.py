"""Configuration of a command: the file, the environment, and the flags that override both."""

from __future__ import annotations

import argparse
import os
from collections.abc import Collection

from gpuwarden.config.loader import KnownNames, load
from gpuwarden.config.schema import Config
from gpuwarden.daemon import log_setup

# Key of the configuration: flag, and variable of the environment.
_OVERRIDES = {
    "runs.socket": ("--socket", "GPUWARDEN_SOCKET"),
    "web.listen": ("--listen", "GPUWARDEN_LISTEN"),
    "source": ("--source", None),
    "control.socket": ("--control", None),
}


def _alert_names() -> Collection[str]:
    """Return the names of all alerts. The import costs 0.2 s, which most commands do not need."""
    from gpuwarden.health.conditions import ALERTS  # noqa: PLC0415

    return ALERTS.keys()


def _check_names() -> Collection[str]:
    from gpuwarden.fitness.check_table import CHECKS  # noqa: PLC0415 - likewise

    return CHECKS.keys()


KNOWN_NAMES: KnownNames = {
    "notify.mute": ("alert", _alert_names),
    "check.off": ("check", _check_names),
    "check.unfit": ("check", _check_names),
}


def load_config(parsed: argparse.Namespace, known_names: KnownNames = KNOWN_NAMES) -> Config:
    """Read the configuration and set up logging. A flag wins over the environment, and that over the file.

    Raises ConfigError.
    """
    overrides, origin = {}, {}
    for key, (flag, variable) in _OVERRIDES.items():
        if variable and (value := os.environ.get(variable)):
            overrides[key], origin[key] = value, variable
        if (value := getattr(parsed, flag.removeprefix("--"), None)) is not None:
            overrides[key], origin[key] = value, flag
    config = load(parsed.config, overrides, origin, known_names)
    log_setup.configure(config.log.level)
    return config
