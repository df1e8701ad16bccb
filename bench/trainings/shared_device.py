"""Device memory that shared_device.c counts: build that library, make a device, read it."""

from __future__ import annotations

import hashlib
import mmap
import shutil
import struct
import subprocess  # noqa: TID251 - compiles
from pathlib import Path

UUID = "GPU-51300000-0000-4000-8000-000000000007"
MIB = 1 << 20

_SOURCE = Path(__file__).with_name("shared_device.c")
_BUILT = Path(__file__).parents[2] / "build/shared_device"
_HEAD, _HOLDER, _SLOTS = struct.Struct("<4Q"), struct.Struct("<qQ"), 64
_SIZE = _HEAD.size + _HOLDER.size * _SLOTS
_BROKEN = 16  # offset


def build() -> Path:
    """Compile the library, once for each state of its source; raises FileNotFoundError without a compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        raise FileNotFoundError("the shared device needs a C compiler: apt-get install gcc libc6-dev")
    library = _BUILT / f"{hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:16]}.so"
    if not library.exists():
        _BUILT.mkdir(parents=True, exist_ok=True)
        fresh = library.with_suffix(".new")
        subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-Wall", "-o", fresh, _SOURCE, "-ldl"], check=True)
        fresh.replace(library)
    return library


class SharedDevice:
    """Device memory in a file. All figures are bytes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _SIZE)

    @classmethod
    def make(cls, path: Path, *, size: int, context: int) -> SharedDevice:
        """Make an empty device; each process on it uses `context` in addition to its pool."""
        path.write_bytes(_HEAD.pack(size, context, 0, 0).ljust(_SIZE, b"\0"))
        return cls(path)

    @property
    def size(self) -> int:
        """Size of the device."""
        return int(_HEAD.unpack_from(self._map)[0])

    @property
    def free(self) -> int:
        """Free bytes."""
        return max(self.size - sum(self.held().values()), 0)

    @property
    def refused(self) -> int:
        """Number of refused regions."""
        return int(_HEAD.unpack_from(self._map)[3])

    def held(self) -> dict[int, int]:
        """Return the bytes of each living process, by pid."""
        pairs = (_HOLDER.unpack_from(self._map, _HEAD.size + slot * _HOLDER.size) for slot in range(_SLOTS))
        return {pid: held for pid, held in pairs if pid and Path(f"/proc/{pid}").exists()}

    def fill(self, spare: int) -> None:
        """Resize it to the bytes in use plus at most `spare`."""
        self._map[:8] = struct.pack("<Q", self.size - max(self.free - spare, 0))

    def refuse_all(self) -> None:
        """Refuse every region from now on, even if there is room, like a driver with another reason."""
        self._map[_BROKEN : _BROKEN + 8] = struct.pack("<Q", 1)
