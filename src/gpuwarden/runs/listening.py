"""Take the path that runs report to: stale sockets make way, anything alive or foreign is refused in words."""

from __future__ import annotations

import errno
import os
import socket
import stat
from pathlib import Path


class SocketInUseError(OSError):
    """The socket's path cannot be taken; the text says what to do."""


def listen(path: Path, mode: int) -> socket.socket:
    """Return a non-blocking listener at `path`, for whom `mode` lets write. Raises OSError that says what to do."""
    _make_way(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    # The mode is right from the first moment; a chmod after bind would leave a gap.
    umask = os.umask(0o777 & ~mode)
    try:
        listener.bind(str(path))
        listener.listen(512)
    except OSError as error:
        listener.close()
        raise OSError(error.errno, f"cannot listen on {path}: {error.strerror}; choose another runs.socket") from None
    finally:
        os.umask(umask)
    return listener


def _make_way(path: Path) -> None:
    """Remove a stale socket, make the directory; refuse when something alive or foreign is there."""
    try:
        path.parent.mkdir(mode=0o755, exist_ok=True)
    except OSError as error:
        raise OSError(
            error.errno,
            f"cannot create {path.parent}: {error.strerror}; run as the systemd service does, or choose another place "
            "with runs.socket, --socket or GPUWARDEN_SOCKET",
        ) from None
    try:
        kind = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(kind):
        raise SocketInUseError(errno.EEXIST, f"{path} exists and is no socket; remove it or choose another runs.socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()  # nobody listens: left behind by a daemon that was killed
            return
        except OSError as error:
            raise SocketInUseError(
                error.errno, f"{path} is in use: {error.strerror}; choose another runs.socket"
            ) from None
    raise SocketInUseError(
        errno.EADDRINUSE, f"another daemon listens on {path}; stop it or choose another runs.socket or --socket"
    )
