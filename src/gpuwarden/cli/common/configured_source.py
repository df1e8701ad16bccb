"""Source of GPU readings from the configuration, for commands that read GPUs."""

from __future__ import annotations

from gpuwarden.config.schema import Config
from gpuwarden.daemon.sources import Source, open_source


def open_configured_source(config: Config) -> Source:
    """Open the source. Raises OSError for an unusable capture or nvidia-ml-py."""
    try:
        return open_source(config.source, config.simulation)
    except (ValueError, ImportError) as error:
        raise OSError(None, str(error)) from None
