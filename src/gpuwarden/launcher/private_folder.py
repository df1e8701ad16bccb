"""Private folder of one `gpuwarden run`: sockets and records of its daemon, and notes of the program's processes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

_PREFIX = "gpuwarden-run-"
_MAX_SOCKET_PATH = 107  # bytes, sun_path of unix(7) without its end
_SOCKET_PATTERN = f"/{_PREFIX}????????/run.sock"
_MIN_AGE_SECONDS = 60.0  # of a folder that is removed: one that was just made may not have its lock yet


@contextlib.contextmanager
def private_folder() -> Iterator[Path]:
    """Yield a new folder, removed with the context; also remove those of killed launchers. Raises OSError."""
    root = _find_root()
    _remove_abandoned(root)
    with tempfile.TemporaryDirectory(prefix=_PREFIX, dir=root, ignore_cleanup_errors=True) as folder:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)  # the kernel releases it with this process
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield Path(folder)
        finally:
            os.close(lock)


def _find_root() -> str:
    """Return the directory for temporary files, or /tmp if a socket's path would be too long in it."""
    root = tempfile.gettempdir()
    return root if len(os.fsencode(root + _SOCKET_PATTERN)) <= _MAX_SOCKET_PATH else "/tmp"  # noqa: S108 - as mkdtemp


def _remove_abandoned(root: str) -> None:
    """Remove this user's folders whose lock no launcher holds, such as that of one that SIGKILL ended."""
    for folder in Path(root).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                found = os.fstat(lock)
                if found.st_uid == os.getuid() and time.time() - found.st_mtime > _MIN_AGE_SECONDS:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder)
            finally:
                os.close(lock)
