"""HTTP client of the daemon's API, for the commands.

Names and messages in the answers come from training processes: `formatting.sanitize` makes them safe to print.
"""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Mapping
from http import HTTPStatus
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from gpuwarden.config.value_types import Address
from gpuwarden.formatting import sanitize
from gpuwarden.host.procfs import read_boot_id
from gpuwarden.web.api.api_paths import INCIDENTS, RUNS

TIMEOUT_SECONDS = 10.0
MAX_ANSWER_BYTES = 64 << 20
_NEED_ACCESS = (HTTPStatus.UNAUTHORIZED, HTTPStatus.BAD_REQUEST)  # no login, or http to a port for https


class ApiError(OSError):
    """No JSON answer, with the reason in one line. `status` is that of an HTTP answer, None if there was none."""

    def __init__(self, text: str, status: int | None = None) -> None:
        super().__init__(None, text)
        self.status = status


class _UnixConnection(http.client.HTTPConnection):
    """HTTP connection over a Unix socket."""

    def __init__(self, path: Path, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


def _reachable(listen: Address) -> Address:
    """Return the address at which a daemon on this machine answers that listens at an address."""
    try:
        if (address := ip_address(listen.host)).is_unspecified:  # the daemon listens on all addresses
            return Address("127.0.0.1" if address.version == 4 else "::1", listen.port)  # noqa: PLR2004 - IPv4
    except ValueError:  # a host name
        pass
    return listen


def daemon_url(api: Address | Path) -> str:
    """Return the URL of a daemon on this machine that listens at an address, or the name of its Unix socket."""
    return str(api) if isinstance(api, Path) else f"http://{_reachable(api)}"


def _connection(api: Address | Path, timeout: float) -> http.client.HTTPConnection:
    if isinstance(api, Path):
        return _UnixConnection(api, timeout)
    return http.client.HTTPConnection(*_reachable(api), timeout=timeout)  # no proxy in front of this machine


def fetch_json(api: Address | Path, path: str, timeout: float = TIMEOUT_SECONDS) -> Any:
    """Return the parsed JSON answer to a path; as `fetch` does."""
    try:
        return json.loads(fetch(api, path, timeout))
    except (ValueError, RecursionError):
        raise unexpected_response(api, path) from None


def fetch(api: Address | Path, path: str, timeout: float = TIMEOUT_SECONDS) -> bytes:
    """Return the answer to a path, from an address or from the Unix socket, which identifies this user.

    Blocks; each wait ends after `timeout` seconds. Raises ApiError.
    """
    name = daemon_url(api)
    connection = _connection(api, timeout)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        answer = response.read(MAX_ANSWER_BYTES)
        if response.status == HTTPStatus.OK:
            return answer
    except (OSError, ValueError, http.client.HTTPException) as error:
        text = sanitize(getattr(error, "strerror", None) or str(error))
        hint = "set its address with --listen, --config or GPUWARDEN_LISTEN"
        raise ApiError(f"no daemon answers at {name}: {text}; {hint}") from None
    finally:
        connection.close()
    if response.status in _NEED_ACCESS:
        raise ApiError(
            f"{name} needs TLS or a login; on its machine, pass --config with the daemon's configuration file"
        )
    raise ApiError(_describe_status(name, path.partition("?")[0], response.status), response.status)


def _describe_status(url: str, path: str, status: int) -> str:
    if status == HTTPStatus.NOT_FOUND:
        return f"{url} has no {path}: no gpuwarden daemon, or an older one"
    if status == HTTPStatus.SERVICE_UNAVAILABLE:
        fault = "cannot read its run database" if path.startswith((RUNS, INCIDENTS)) else "has no successful poll"
        return f"the daemon at {url} {fault}; see its log"
    return f"{url} is not a gpuwarden daemon: it responded with status {status}"


def unexpected_response(api: Address | Path, path: str) -> ApiError:
    """Return the error of an answer that is not gpuwarden's."""
    return ApiError(f"{daemon_url(api)} is not a gpuwarden daemon: unexpected response from {path.partition('?')[0]}")


def find_socket(answer: Mapping[str, Any]) -> Path | None:
    """Return the daemon's Unix socket of the API; None for a daemon on another machine or an older one."""
    boot_id, path = answer.get("boot_id"), answer.get("socket")
    return Path(path) if isinstance(path, str) and boot_id is not None and boot_id == read_boot_id() else None
