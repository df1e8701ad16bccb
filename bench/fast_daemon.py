"""Daemon at a hundred times its speed, on the driver that it finds: `python bench/fast_daemon.py FOLDER`, for soak.py.

What is due every second is due every 10 ms, by a configuration that no file can have. The clock of readings runs a
hundred times faster, and with it the slow tier and the windows of peaks and rates.
"""

import asyncio
import sys
import time
from dataclasses import replace
from pathlib import Path

from gpuwarden.config.schema import Config
from gpuwarden.config.value_types import Address
from gpuwarden.daemon import log_setup
from gpuwarden.daemon.daemon import Daemon
from gpuwarden.daemon.sources import open_source
from gpuwarden.nvml import session

SPEED = 100
TIMEOUT_SECONDS = 1.0  # with HTTP clients: a hundredth of the default would cut them on a busy machine


def fast_config(folder: Path) -> Config:
    """Return the default configuration, a hundred times faster."""
    config = Config()
    poll = replace(
        config.poll, interval=config.poll.interval / SPEED, memory_interval=config.poll.memory_interval / SPEED
    )
    runs = replace(config.runs, socket=folder / "run.sock", expiry=config.runs.expiry / SPEED, new_per_minute=60_000)
    web = replace(config.web, listen=Address("127.0.0.1", 0), timeout=TIMEOUT_SECONDS)
    return replace(config, poll=poll, runs=runs, web=web)


def main() -> None:
    """Serve; the first line of standard output is the port."""
    config = fast_config(Path(sys.argv[1]))
    log_setup.configure("warning")
    session.RETRY_SECONDS /= SPEED
    source = open_source(config.source, config.simulation)
    served = Daemon(config, replace(source, clock=lambda: time.monotonic() * SPEED))
    asyncio.run(served.run(lambda: print(served.web.address[1], flush=True)))


if __name__ == "__main__":
    main()
