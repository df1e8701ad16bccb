"""Why a server could not be reached, in words for whoever set it up."""

from __future__ import annotations

import socket
import sys

from gpuwarden.config_values import shown

LONGEST_REASON = 200  # characters


def why(error: Exception, timeout: float) -> str:
    """Say what an error of a connection means; `timeout` is how many seconds the server had.

    The text may repeat an address: one that is a secret has still to be taken out of it.
    """
    if isinstance(error, TimeoutError):
        return f"no answer within {timeout:g} s"
    if isinstance(error, socket.gaierror):
        return f"its name is not known: {error.strerror}"
    ssl = sys.modules.get("ssl")  # whose errors come only where it is loaded
    if ssl is not None and isinstance(error, ssl.SSLError):
        from gpuwarden.alerts.tls import fault  # noqa: PLC0415 - as above

        return fault(error)
    return shown(getattr(error, "strerror", None) or str(error) or type(error).__name__, LONGEST_REASON)
