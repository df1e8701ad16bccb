"""Search of a shared library, as the dynamic loader does it: of the driver, or one that a framework will load."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from gpuwarden.doctor.frameworks.elf import DynamicSection
from gpuwarden.doctor.frameworks.environment import Environment
from gpuwarden.doctor.model import Context

LD_LIBRARY_PATH = "LD_LIBRARY_PATH"
_DEFAULT_FOLDERS = (
    "lib64",
    "usr/lib64",
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "lib",
    "usr/lib",
    "usr/lib/wsl/lib",
    "usr/local/nvidia/lib64",  # Google's Kubernetes
    "run/opengl-driver/lib",  # NixOS
)
_NO_SECTION = DynamicSection()
_CACHED = re.compile(r"\s+(\S+) \(([^)]*)\) => (/.*)")


@dataclass(frozen=True, slots=True)
class FoundLibrary:
    """A library's file, and what leads to it: the framework's own path, LD_LIBRARY_PATH, or the system."""

    path: Path
    by: str

    @property
    def version(self) -> str:
        """Version in the name of the file that a link leads to; empty if there is none."""
        return self.path.resolve().name.partition(".so.")[2] if self.path.is_symlink() else ""


class LibrarySearch:
    """Search on one machine, in the order of ld.so(8): rpath, LD_LIBRARY_PATH, runpath, cache, default folders.

    With an `environment`, NVIDIA's packages in it are searched too.
    """

    def __init__(self, context: Context, environment: Environment | None = None) -> None:
        self._variable = [Path(each or ".") for each in context.environ.get(LD_LIBRARY_PATH, "").split(":")]
        if not context.environ.get(LD_LIBRARY_PATH):
            self._variable = []
        path = () if environment is None else environment.path
        self._packages = [lib for each in path for lib in sorted(Path(each).glob("nvidia/*/lib"))]
        self._cached = read_loader_cache(context.root)
        self._defaults = [context.root / each for each in _DEFAULT_FOLDERS]

    def find(
        self, name: str, section: DynamicSection = _NO_SECTION, *, with_variable: bool = True
    ) -> FoundLibrary | None:
        """Return the file that a library with this dynamic section loads; None if there is none."""
        return next(self._candidates(name, section, with_variable), None)

    def _candidates(self, name: str, section: DynamicSection, with_variable: bool) -> Iterator[FoundLibrary]:  # noqa: FBT001 - private
        yield from (FoundLibrary(each, "own path") for each in _existing(name, section.rpath))
        if with_variable:
            yield from (FoundLibrary(each, LD_LIBRARY_PATH) for each in _existing(name, self._variable))
        yield from (FoundLibrary(each, "own path") for each in _existing(name, section.runpath))
        if section.rpath:  # torch and JAX load NVIDIA's packages from any folder of sys.path
            yield from (FoundLibrary(each, "own path") for each in _existing(name, self._packages))
        if name in self._cached:
            yield FoundLibrary(self._cached[name], "system")
        yield from (FoundLibrary(each, "system") for each in _existing(name, self._defaults))


def read_loader_cache(root: Path) -> Mapping[str, Path]:
    """Return the libraries in the loader's cache, by name, for 64 bits; empty without a cache."""
    cache = root / "etc/ld.so.cache"
    program = shutil.which("ldconfig") or shutil.which("ldconfig", path="/sbin:/usr/sbin")
    if program is None or not cache.exists():
        return {}
    try:
        answer = subprocess.run(
            [program, "-p", "-C", str(cache)], capture_output=True, text=True, timeout=5, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return {}
    found: dict[str, Path] = {}
    for match in map(_CACHED.match, answer.splitlines()):
        if match and "64" in match[2]:
            found.setdefault(match[1], Path(match[3]))
    return found


def _existing(name: str, folders: Iterable[Path]) -> Iterator[Path]:
    return (file for each in folders if (file := each / name).exists())
