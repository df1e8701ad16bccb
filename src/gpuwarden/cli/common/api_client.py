"""HTTP client of the daemon's API, for the commands.

Names and messages in the answers come from training processes: `terminal.sanitize` makes them safe to print.
"""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from ipaddress import ip_address
from typing import Any

from gpuwarden.cli.common.terminal import sanitize
from gpuwarden.config.value_types import Address

TIMEOUT_SECONDS = 10.0
MAX_ANSWER_BYTES = 64 << 20


class ApiError(OSError):
    """No JSON answer, with the reason in one line. `status` is that of an HTTP answer, None if there was none."""

    def __init__(self, text: str, status: int | None = None) -> None:
        super().__init__(None, text)
        self.status = status


def daemon_url(listen: Address) -> str:
    """Return the URL of a daemon on this machine that listens at an address."""
    try:
        if (address := ip_address(listen.host)).is_unspecified:  # the daemon listens on all addresses
            listen = Address("127.0.0.1" if address.version == 4 else "::1", listen.port)  # noqa: PLR2004 - IPv4
    except ValueError:  # a host name
        pass
    return f"http://{listen}"


def fetch_json(listen: Address, path: str, timeout: float = TIMEOUT_SECONDS) -> Any:
    """Return the parsed JSON answer to a path. Blocks; each wait ends after `timeout` seconds. Raises ApiError."""
    url = daemon_url(listen)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy in front of this machine
    try:
        with opener.open(f"{url}{path}", timeout=timeout) as response:
            return json.loads(response.read(MAX_ANSWER_BYTES))
    except urllib.error.HTTPError as error:
        raise ApiError(f"{url} is not a gpuwarden daemon: it responded with status {error.code}", error.code) from None
    except (OSError, ValueError, RecursionError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        text = sanitize(getattr(reason, "strerror", None) or str(reason))
        hint = "set its address with --listen, --config or GPUWARDEN_LISTEN"
        raise ApiError(f"no daemon answers at {url}: {text}; {hint}") from None
