"""HTTP client of a daemon's API, for the commands.

Names and messages in its answers come from training processes: `terminal.sanitize` makes them harmless.
"""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from typing import Any

from gpuwarden.cli.common.terminal import sanitize
from gpuwarden.config.value_types import Address

TIMEOUT_SECONDS = 10.0
MAX_ANSWER_BYTES = 64 << 20
_ANYWHERE = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - listened on by the daemon


class NoAnswerError(Exception):
    """Absence of a JSON answer; the text says why."""


class StatusError(Exception):
    """The answer is a status other than 200."""

    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status = status


def daemon_url(listen: Address) -> str:
    """Return the URL of a daemon that listens at an address."""
    host = _ANYWHERE.get(listen.host, listen.host)
    return f"http://{f'[{host}]' if ':' in host else host}:{listen.port}"


def fetch_json(listen: Address, path: str, timeout: float = TIMEOUT_SECONDS) -> Any:
    """Return the parsed JSON answer to a path. Blocks, each wait for `timeout` seconds at most.

    Raises SilenceError or StatusError.
    """
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy stands before this machine
    try:
        with opener.open(f"{daemon_url(listen)}{path}", timeout=timeout) as response:
            return json.loads(response.read(MAX_ANSWER_BYTES))
    except urllib.error.HTTPError as error:
        raise StatusError(error.code) from None
    except (OSError, ValueError, RecursionError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise NoAnswerError(sanitize(getattr(reason, "strerror", None) or str(reason))) from None
