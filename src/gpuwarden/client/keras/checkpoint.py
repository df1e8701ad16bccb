"""Checkpoint files of a model, written whole or not at all.

HDF5 ends the process on a full disk: what it could not write it tries to write again as its objects go, and crashes
(seen with h5py 3 and HDF5 1.14). So the disk is checked before.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

from gpuwarden.client.keras.model_memory import list_variable_bytes

_VARIABLE_BYTES = 8192  # bytes that a variable takes in addition to its values
_FILE_BYTES = 1 << 20  # and a file
_CANNOT_TELL = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)


def save(model: Any, path: Path, *, keep: bool = True) -> None:
    """Save a model, or its weights, so that at `path` there is always a whole one: the last or this."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{os.urandom(4).hex()}-{path.name}")  # no other worker's, on a folder that they share
    try:
        check_room(model, part)
        (model.save_weights if path.name.endswith(".weights.h5") else model.save)(str(part))
        if keep:
            part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def check_room(model: Any, path: Path) -> None:
    """Raise OSError where the model's state does not fit into a file at `path`, which is there afterwards.

    Quotas and limits of the process count as well. What the file held stays; blocks for as long as the disk takes.
    """
    sizes = list_variable_bytes(model)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
    try:
        os.posix_fallocate(descriptor, 0, sum(sizes) + _VARIABLE_BYTES * len(sizes) + _FILE_BYTES)
    except OSError as error:
        if error.errno not in _CANNOT_TELL:
            raise OSError(error.errno, os.strerror(error.errno or 0), str(path)) from None
    finally:
        os.close(descriptor)
