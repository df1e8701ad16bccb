"""Model of the doctor's checks: their context, their results, and the rows of the table of checks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from gpuwarden.doctor.gpu_survey import GpuSurvey
from gpuwarden.gpu.snapshot import Snapshot

Status = Literal["pass", "warn", "fail", "skip"]
# Titles of the subjects in names of checks.
SUBJECTS: Mapping[str, str] = {
    "machine": "Machine",
    "driver": "Driver",
    "device": "Access to the GPUs",
    "gpu": "GPUs",
    "python": "Python",
    "tensorflow": "TensorFlow",
    "keras": "Keras",
    "torch": "PyTorch",
    "jax": "JAX",
    "environment": "Environment variables",
    "jobs": "Jobs on the GPUs",
    "memory": "Memory",
    "input": "Input",
}


@dataclass(frozen=True, slots=True)
class CheckResult:
    """Result of one check.

    The name is `<subject>.<what>` and stable: `--json` and `gpuwarden explain` use it; it is empty until `check` adds
    it. `found` is one sentence. `warn` and `fail` also have `why`, the reason that it matters, and `fix`, a command or
    one imperative sentence.
    """

    name: str
    status: Status
    found: str
    why: str = ""
    fix: str = ""


def passed(found: str) -> CheckResult:
    """Return the result of a check that found nothing wrong."""
    return CheckResult("", "pass", found)


def skipped(reason: str) -> CheckResult:
    """Return the result of a check that cannot apply here."""
    return CheckResult("", "skip", reason)


def flagged(status: Literal["warn", "fail"], found: str, why: str, fix: str) -> CheckResult:
    """Return the result of a check that found a problem."""
    return CheckResult("", status, found, why, fix)


def warned(found: str, why: str, fix: str) -> CheckResult:
    """Return the result of a check that found a risk."""
    return flagged("warn", found, why, fix)


def failed(found: str, why: str, fix: str) -> CheckResult:
    """Return the result of a check that found what keeps a training from working."""
    return flagged("fail", found, why, fix)


@dataclass(frozen=True, slots=True)
class Context:
    """Machine and environment to check.

    `python` is the training environment's interpreter, not resolved: a venv's link leads to the base interpreter and
    away from its packages. `root` is the folder of the machine's files; a test has others. `survey` returns one poll of
    the GPUs, the same one to all checks. `read_path` is a file or folder whose read speed is measured.
    """

    python: Path
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    root: Path = Path("/")
    read_path: Path | None = None
    survey: Callable[[], Snapshot] = field(default_factory=GpuSurvey)

    @property
    def proc(self) -> Path:
        """The proc file system."""
        return self.root / "proc"

    @property
    def sys(self) -> Path:
        """The sys file system."""
        return self.root / "sys"

    @property
    def dev(self) -> Path:
        """Folder of device files."""
        return self.root / "dev"


@dataclass(frozen=True, slots=True)
class CheckRow:
    """Row of the table of checks: a function, and the names of its results with what each checks, for the docs.

    The function may raise: that becomes a `warn`.
    """

    check: Callable[[Context], Iterable[CheckResult]]
    names: Mapping[str, str]


def check(name: str, meaning: str) -> Callable[[Callable[[Context], Iterable[CheckResult]]], CheckRow]:
    """Make a row of the table from a function all of whose results have one name."""

    def make_row(function: Callable[[Context], Iterable[CheckResult]]) -> CheckRow:
        return CheckRow(lambda context: (replace(each, name=name) for each in function(context)), {name: meaning})

    return make_row
