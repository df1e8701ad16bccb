"""Source of GPU readings that the configuration chooses, for the commands that read GPUs."""

from __future__ import annotations

from gpuwarden.config.schema import Config
from gpuwarden.daemon.sources import Source, open_source


def open_configured_source(config: Config) -> Source:
    """Open the source. Raises OSError for a capture or an nvidia-ml-py that cannot be used."""
    try:
        return open_source(config.source, config.simulation)
    except (ValueError, ImportError) as error:
        raise OSError(None, str(error)) from None
