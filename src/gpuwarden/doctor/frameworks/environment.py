"""Training environment, read through its interpreter: version, module search path, installed distributions."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import Distribution, distributions
from pathlib import Path

from packaging.utils import canonicalize_name

from gpuwarden.doctor.model import Context

PATIENCE_SECONDS = 10.0  # for an interpreter on a slow network file system; a local one takes 25 ms
# `-c` puts the working folder first on the path, as for a script there. Python before 3.10 cannot list its modules:
# those of this interpreter stand for them.
_PROGRAM = """import sys
path = sys.path[:]
sys.path[:] = filter(None, path)  # a json.py in the working folder is a finding, not a failure
import json
names = sorted(getattr(sys, "stdlib_module_names", ()))
print()
print(json.dumps({"version": sys.version.split()[0], "prefix": sys.prefix, "path": path, "modules": names}))"""


class InterpreterError(Exception):
    """The interpreter of an environment does not run; the text says why."""


@dataclass(frozen=True)
class Environment:
    """An environment. `path` is its module search path without `folder`, the working folder, which comes first.

    `folder` is None if the interpreter does not search it, or it was deleted. `distributions` are by canonical name,
    those that come first on the path first.
    """

    python: Path
    version: str
    prefix: Path
    path: tuple[str, ...]
    folder: Path | None
    stdlib: frozenset[str]
    distributions: Mapping[str, tuple[Distribution, ...]]

    def find(self, module: str) -> ModuleSpec | None:
        """Return where a module is found, the working folder aside; without an origin if it is a bare folder."""
        return PathFinder.find_spec(module, list(self.path))

    def find_file(self, module: str, *parts: str) -> Path | None:
        """Return an existing file of a package; None if the package or the file is missing."""
        spec = self.find(module)
        for folder in () if spec is None else spec.submodule_search_locations or ():
            if (file := Path(folder, *parts)).exists():
                return file
        return None

    def distribution(self, name: str) -> Distribution | None:
        """Return the distribution that is imported; `name` is canonical."""
        found = self.distributions.get(name, ())
        return found[0] if found else None

    def find_shadow(self, module: str) -> Path | None:
        """Return the file in the working folder that is imported in place of an installed module."""
        if self.folder is None or (spec := PathFinder.find_spec(module, [str(self.folder)])) is None:
            return None
        installed = self.find(module)
        is_same = installed is not None and installed.origin == spec.origin
        return None if is_same or spec.origin is None else Path(spec.origin)

    def pip(self, *arguments: str) -> str:
        """Return a pip command for this environment."""
        return " ".join([str(self.python), "-m", "pip", *arguments])

    def replace(self, names: Iterable[str], wanted: str, folder: Path | None = None) -> str:
        """Return commands that replace distributions by another, and remove the folder that they leave."""
        remove = "" if folder is None else f"rm -rf {folder} && "
        return f"{self.pip('uninstall', '-y', *names)} && {remove}{self.pip('install', wanted)}"


def read_environment(context: Context) -> Environment:
    """Read the environment of a context, once for all checks. Raises InterpreterError."""
    with _turn:
        found = _read(context.python, tuple(sorted(context.environ.items())), _find_folder())
    if isinstance(found, InterpreterError):
        raise found
    return found


_turn = threading.Lock()


def _find_folder() -> Path | None:
    """Return the working folder; None if it was deleted."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        return None


@functools.lru_cache(maxsize=2)
def _read(
    python: Path, environ: tuple[tuple[str, str], ...], folder: Path | None
) -> Environment | InterpreterError:  # kept too: one that hangs is not asked again for each check
    try:
        output = run_python(python, _PROGRAM, environ=dict(environ))
        answer = json.loads(output.splitlines()[-1])
        path = tuple(each for each in answer["path"] if each)
    except InterpreterError as error:
        return error
    except (LookupError, ValueError, TypeError):
        return InterpreterError(f"{python} is no Python: it does not run a program given by -c")
    return Environment(
        python=python,
        version=answer["version"],
        prefix=Path(answer["prefix"]),
        path=path,
        folder=folder if "" in answer["path"] else None,
        stdlib=frozenset(answer["modules"] or sys.stdlib_module_names),
        distributions=_list_distributions(path),
    )


def run_python(python: Path, program: str, *arguments: str, environ: Mapping[str, str]) -> str:
    """Run a short program with an interpreter and return its output. Raises InterpreterError."""
    try:
        done = subprocess.run(
            [str(python), "-c", program, *arguments],
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PATIENCE_SECONDS,
            check=False,
        )
    except OSError as error:
        raise InterpreterError(f"{python}: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise InterpreterError(f"{python} did not answer within {PATIENCE_SECONDS:.0f} s") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise InterpreterError(f"{python} failed: {last}")
    return done.stdout


def _list_distributions(path: tuple[str, ...]) -> Mapping[str, tuple[Distribution, ...]]:
    found: dict[str, list[Distribution]] = defaultdict(list)
    for folder in dict.fromkeys(path):
        for name, each in _named(folder):
            found[name].append(each)
    return {name: tuple(each) for name, each in found.items()}


def _named(folder: str) -> Iterator[tuple[str, Distribution]]:
    for each in distributions(path=[folder]):
        try:
            name = each.metadata["Name"]  # None where an uninstallation left an empty folder
        except UnicodeDecodeError:  # an old package's, in another encoding
            continue
        if name:
            yield canonicalize_name(name), each
