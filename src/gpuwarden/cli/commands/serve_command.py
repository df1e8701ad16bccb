"""Commands `gpuwarden serve` and `gpuwarden once`: the daemon, and a single poll of it."""

from __future__ import annotations

import argparse
import asyncio
import logging
import resource
import signal
import sys

from gpuwarden.cli.commands import hang_up
from gpuwarden.cli.common.config_flags import load_config
from gpuwarden.cli.common.configured_source import open_configured_source
from gpuwarden.cli.common.terminal import FAILED
from gpuwarden.config.loader import ConfigError
from gpuwarden.config.schema import Config
from gpuwarden.config.value_types import Address
from gpuwarden.daemon import log_setup
from gpuwarden.daemon.daemon import Daemon
from gpuwarden.formatting import format_fields

log = logging.getLogger("gpuwarden")


def serve(parsed: argparse.Namespace) -> int:
    """Run the daemon until SIGTERM or SIGINT."""
    config = load_config(parsed)
    _raise_file_limit()
    daemon = Daemon(config, open_configured_source(config))
    asyncio.run(daemon.run(lambda: _log_addresses(daemon, config), lambda: _hang_up(daemon, parsed)))
    return 0


def once(parsed: argparse.Namespace) -> int:
    """Poll once, and print the metrics."""
    config = load_config(parsed)
    log_setup.configure("warning")  # the output is the metrics
    daemon = Daemon(config, open_configured_source(config))
    state = asyncio.run(daemon.poll())
    sys.stdout.write(daemon.text)
    return FAILED if state.snapshot.fault else 0


def _hang_up(daemon: Daemon, parsed: argparse.Namespace) -> None:
    """Stop where the terminal is gone; otherwise reload the configuration, or log what is wrong with it."""
    if hang_up.is_terminal_closed():
        signal.raise_signal(signal.SIGTERM)
        return
    try:
        daemon.reload(load_config(parsed))
    except ConfigError as error:
        for problem in error.problems:
            log.error("configuration invalid, keeping the previous one %s", format_fields(error=problem))  # noqa: TRY400


def _log_addresses(daemon: Daemon, config: Config) -> None:
    url = f"{config.web.read_scheme()}://{Address(*daemon.web.address)}"
    log.info("%s", daemon.status)
    # One line for each: a terminal of 80 columns would wrap an address.
    log.info("status page %s/", url)
    log.info("metrics %s/metrics", url)
    path = config.runs.socket
    log.info("runs report to %s", path)
    if path != Config().runs.socket:
        log.info("where they run: export GPUWARDEN_SOCKET=%s", path)


def _raise_file_limit() -> None:
    """Raise the limit of open files to its maximum, so that many runs and clients do not block a scrape."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
