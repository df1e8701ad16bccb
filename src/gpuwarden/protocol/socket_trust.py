"""Trust in the socket between runs and the daemon: who is at the other end, and which users may listen at a path."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
from pathlib import Path

OVERFLOW_UID = 65534  # of every user without a mapping, in a user namespace: user_namespaces(7)
WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
SHARED = stat.S_ISVTX | stat.S_IWOTH  # mode of /tmp


def read_credentials(connection: socket.socket) -> tuple[int, int]:
    """Return pid and uid of the process at the other end; the pid is 0 for one outside this pid namespace."""
    pid, uid, _gid = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid


def find_foreign_link(path: str | os.PathLike[str]) -> str | None:
    """Return a sentence about the outermost link to `path` that another user made in a folder such as /tmp, if any.

    With fs.protected_symlinks, the default of Debian, the kernel follows none of these and answers EACCES (proc(5)).
    """
    own, socket_path = os.geteuid(), Path(os.path.abspath(path))  # noqa: PTH100 - resolve() would follow links
    with contextlib.suppress(OSError):  # a folder that does not exist, or cannot be read
        for each in (*reversed(socket_path.parents), socket_path):
            found, around = each.lstat(), each.parent.stat()
            foreign = stat.S_ISLNK(found.st_mode) and found.st_uid not in (0, own, around.st_uid)
            if foreign and around.st_mode & SHARED == SHARED:
                return f"{each} belongs to user id {found.st_uid}"
    return None


def find_distrust(path: str | os.PathLike[str], uid: int) -> str | None:
    """Return why a socket at `path` is not trusted if user `uid` listens; None for root, the own user, or a service's.

    A service's user is recognized by the folders of the path: only that user, root and the own user can write them.
    Raises OSError where a folder cannot be read.
    """
    own = os.geteuid()
    if uid in (0, own):
        return None
    if link := find_foreign_link(path):
        return link
    folders = Path(os.path.abspath(path)).parents  # noqa: PTH100 - resolve() would hide who made a link
    # A container may see an id of the folder's owner (an idmapped mount), and none of the process that listens.
    owner = folders[0].stat().st_uid if uid == OVERFLOW_UID else uid
    for folder in folders:
        for found in (folder.lstat(), folder.stat()):
            if found.st_uid not in (0, own, owner):
                return f"{folder} belongs to user id {found.st_uid}"
            if found.st_mode & WRITABLE_BY_OTHERS and not stat.S_ISLNK(found.st_mode):
                return f"other users can write {folder}"
    return None
