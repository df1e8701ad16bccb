"""Trust in the socket between runs and the daemon: which users may listen at a path."""

from __future__ import annotations

import os
import stat
from pathlib import Path

WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def find_distrust(path: str | os.PathLike[str], uid: int) -> str | None:
    """Return why user `uid` may not listen at `path`; None for root, the own user, and the owner of the way to it.

    A service's user is known by that way: only they, root and the own user can write a folder on it. In a user
    namespace, users without a mapping share one id (user_namespaces(7)), so there too the folders decide. Raises
    OSError where a folder cannot be read.
    """
    own = os.geteuid()
    if uid in (0, own):
        return None
    for folder in Path(os.path.abspath(path)).parents:  # noqa: PTH100 - resolve() would hide who made a link
        for found in (folder.lstat(), folder.stat()):
            if found.st_uid not in (0, own, uid):
                return f"{folder} belongs to user id {found.st_uid}"
            if found.st_mode & WRITABLE_BY_OTHERS and not stat.S_ISLNK(found.st_mode):
                return f"other users can write {folder}"
    return None
