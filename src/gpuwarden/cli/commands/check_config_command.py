"""Command `gpuwarden check-config`: all mistakes in a configuration file."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterator
from dataclasses import replace

from gpuwarden.alerts.delivery.validation import warnings
from gpuwarden.cli.common.config_flags import KNOWN_NAMES
from gpuwarden.cli.common.configured_source import open_configured_source
from gpuwarden.cli.common.terminal import WRONG_USE, complain, say
from gpuwarden.config.loader import load
from gpuwarden.config.schema import Config, SimulationConfig
from gpuwarden.config.value_types import SOURCE
from gpuwarden.config.web_config import WebConfigError
from gpuwarden.daemon.daemon import Daemon
from gpuwarden.host.unix_socket import find_group
from gpuwarden.web.access.access_control import AccessControl

_GPUS = 8


def run(parsed: argparse.Namespace) -> int:
    """Check the file, warn of parts that notifications lack, and print the number of series. Raises ConfigError."""
    config = load(parsed.file, known_names=KNOWN_NAMES)
    for warning in warnings(config):
        complain(f"{parsed.file}: warning: {warning}")
    missing = list(_find_missing(config))
    for each in missing:
        complain(f"{parsed.file}: {each}")
    if missing:
        return WRONG_USE
    say(f"{parsed.file}: OK")
    series, runs = asyncio.run(_count_series(config))
    say(f"metrics.profile {config.metrics.profile}: {series} series with {_GPUS} simulated GPUs and {runs} runs")
    return 0


async def _count_series(config: Config) -> tuple[int, int]:
    """Return the number of series that a simulated machine has with the configuration, and that of its runs."""
    simulated = replace(config, source=SOURCE.read("simulated"), simulation=SimulationConfig(gpus=_GPUS))
    daemon = Daemon(simulated, open_configured_source(simulated))
    state = await daemon.poll()
    series = sum(not line.startswith("#") for line in daemon.text.splitlines())
    await daemon.release()
    return series, len(state.runs)


def _find_missing(config: Config) -> Iterator[str]:
    """Yield what the daemon needs at its start and this machine lacks, with the option's key."""
    try:
        if config.source.name == "capture":
            open_configured_source(config)
    except OSError as error:
        yield f"source: {error.strerror}"
    try:
        if config.web.config_file is not None:
            AccessControl(config.web.config_file)
    except WebConfigError as error:
        yield f"web.config_file: {error.strerror}"
    try:
        if config.runs.socket_group is not None:
            find_group(config.runs.socket_group)
    except OSError as error:
        yield f"runs.socket_group: {error.strerror}"
