"""Checkpoint files of a model, written completely or not at all.

HDF5 crashes the process on a full disk: it retries failed writes while its objects are freed (seen with h5py 3 and HDF5
1.14). So the free space is checked first.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

from gpuwarden.client.keras.model_memory import list_variable_bytes

_VARIABLE_BYTES = 8192  # overhead of a variable
_FILE_BYTES = 1 << 20  # overhead of a file
_UNSUPPORTED = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)


def save(model: Any, path: Path, *, keep: bool = True) -> None:
    """Save a model, or its weights, atomically: `path` always has a complete file, the last one or this one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{os.urandom(4).hex()}-{path.name}")  # unique: workers may share the folder
    try:
        check_room(model, part)
        (model.save_weights if path.name.endswith(".weights.h5") else model.save)(str(part))
        if keep:
            part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def check_room(model: Any, path: Path) -> None:
    """Raise OSError if the model's state does not fit into a file at `path`; the file exists afterwards.

    Checks quotas and limits of the process too. The content of the file is kept. Blocks for as long as the disk takes.
    """
    sizes = list_variable_bytes(model)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
    try:
        os.posix_fallocate(descriptor, 0, sum(sizes) + _VARIABLE_BYTES * len(sizes) + _FILE_BYTES)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise OSError(error.errno, os.strerror(error.errno or 0), str(path)) from None
    finally:
        os.close(descriptor)
