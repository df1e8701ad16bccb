"""Client of the daemon's control socket; it imports little, as a scheduler waits for its answers."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

MAX_REQUEST_BYTES = 8192  # of a request
MAX_ANSWER_BYTES = 1 << 17
ANSWER_SECONDS = 120.0  # timeout of a client: a poll in progress takes 30 s at most, and calls may hang


def send_command(path: Path, request: str, timeout: float = ANSWER_SECONDS) -> tuple[bool, str]:
    """Send a request to the daemon at `path`; return whether it succeeded, and its response.

    Blocks, for at most `timeout` seconds at a time. Raises OSError.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout)
        try:
            connection.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            raise OSError(
                None,
                f"no daemon listens on {path}; if one is running, pass its --config or --control",
            ) from None
        except PermissionError:
            raise OSError(None, f"{path}: permission denied: only for root and the daemon's user; try sudo") from None
        try:
            with contextlib.suppress(ConnectionError):  # it may respond and close before it has the whole request
                connection.sendall(request.encode() + b"\n")
            with connection.makefile("rb") as answers:
                line = answers.readline(MAX_ANSWER_BYTES).decode(errors="replace").strip()
        except TimeoutError:
            raise OSError(None, f"the daemon at {path} has not answered for {timeout:g} s") from None
        except ConnectionError:
            line = ""
    word, _, text = line.partition(" ")
    if word not in ("ok", "failed"):
        raise OSError(None, f"the daemon at {path} stopped before it answered")
    return word == "ok", text
