"""Log on standard error: with the priority prefix of sd-daemon(3) under systemd, plain in a terminal."""

from __future__ import annotations

import logging
import os

from gpuwarden.fairness.log_limiter import UserLineFilter

_PRIORITY = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3, logging.CRITICAL: 2}


class _JournalFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        # Every line of a traceback needs the prefix, or the journal gives it a lower priority.
        prefix = f"<{_PRIORITY.get(record.levelno, 6)}>"
        return "\n".join(prefix + line for line in super().format(record).splitlines())


def configure(level: str) -> None:
    """Write log lines of `level` (debug, info, warning, error) and above to standard error."""
    handler = logging.StreamHandler()
    handler.addFilter(UserLineFilter())
    if "JOURNAL_STREAM" in os.environ:
        handler.setFormatter(_JournalFormatter("%(message)s"))
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
