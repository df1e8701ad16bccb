"""Listener on a Unix socket that replaces a stale socket, and refuses to replace anything else."""

from __future__ import annotations

import errno
import grp
import os
import socket
import stat
from pathlib import Path

from gpuwarden.protocol.socket_trust import find_distrust, find_foreign_link

BACKLOG = 512  # connections waiting to be accepted


class SocketInUseError(OSError):
    """The socket's path is in use; the text says what to do."""


def listen(
    path: Path,
    mode: int,
    kind: int,
    option: str,
    *,
    settings: str = "",
    group: str | None = None,
) -> socket.socket:
    """Return a non-blocking listener at `path` with file mode `mode`, owned by `group` if given.

    `option` is the setting that chooses the path, `settings` names all ways to set it. Raises OSError with a text that
    says what to do.
    """
    _make_way(path, kind, option, settings or option)
    listener = socket.socket(socket.AF_UNIX, kind | socket.SOCK_NONBLOCK)
    # umask, because a chmod after bind would leave a gap.
    umask = os.umask(0o777 & ~mode)
    try:
        listener.bind(str(path))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        text = f"user id {os.geteuid()} cannot listen on {path}: {error.strerror}; set another {option}"
        raise OSError(error.errno, text) from None
    finally:
        os.umask(umask)
    if group is not None:
        try:
            _give(path, group)
        except OSError:
            listener.close()
            path.unlink()
            raise
    return listener


def find_group(group: str) -> int:
    """Return the id of a group. Raises OSError with a text that says what to do."""
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        raise OSError(
            errno.EINVAL, f"group {group} does not exist: create it, or set another runs.socket_group"
        ) from None


def _give(path: Path, group: str) -> None:
    number = find_group(group)
    try:
        os.chown(path, -1, number)
    except OSError as error:
        raise OSError(
            error.errno,
            f"cannot set the group of {path} to {group}: {error.strerror}; the daemon's user must be in it "
            f"(SupplementaryGroups={group} in a drop-in of the service)",
        ) from None


def _check_folder(path: Path, settings: str) -> None:
    """Raise OSError if another user can replace the socket."""
    folder = path.parent
    for found in (folder.lstat(), folder.stat()):  # of a link: both
        if find_distrust(path, found.st_uid):
            raise OSError(
                errno.EPERM,
                f"{folder} belongs to user id {found.st_uid}, who can replace the socket; remove the folder, or set "
                f"another path with {settings}",
            )
    if found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
        raise OSError(
            errno.EPERM,
            f"every user can write {folder} and replace the socket; run chmod o-w {folder}, or set another path with "
            f"{settings}",
        )


def _make_way(path: Path, kind: int, option: str, settings: str) -> None:
    """Create the directory and remove a stale socket. Raises OSError for a live socket or another kind of file."""
    if link := find_foreign_link(path):  # before the kernel has to follow it
        text = f"{link}, who can replace the socket; remove the link, or set another path with {settings}"
        raise OSError(errno.EPERM, text)
    try:
        path.parent.mkdir(mode=0o755, exist_ok=True)
    except OSError as error:
        raise OSError(
            error.errno,
            f"cannot create {path.parent}: {error.strerror}; run it as the systemd service, or set another "
            f"path with {settings}",
        ) from None
    _check_folder(path, settings)
    try:
        found = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found):
        raise SocketInUseError(errno.EEXIST, f"{path} exists and is not a socket; remove it or set another {option}")
    with socket.socket(socket.AF_UNIX, kind | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()  # no listener: left behind by a daemon that was killed
            return
        except OSError as error:
            raise SocketInUseError(error.errno, f"{path} is in use: {error.strerror}; set another {option}") from None
    raise SocketInUseError(
        errno.EADDRINUSE, f"another daemon listens on {path}; stop it or set another path with {settings}"
    )
