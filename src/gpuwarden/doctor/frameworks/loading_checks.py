"""Check of the CUDA libraries that a framework would load: all are found, and cuDNN is new enough."""

from __future__ import annotations

import re
from pathlib import Path

from gpuwarden.doctor.frameworks.builds import InstalledBuild
from gpuwarden.doctor.frameworks.cuda_versions import Version, format_version, parse_cudnn, parse_version
from gpuwarden.doctor.frameworks.environment import InterpreterError, run_python
from gpuwarden.doctor.frameworks.shared_libraries import LD_LIBRARY_PATH, FoundLibrary, LibrarySearch
from gpuwarden.doctor.model import CheckResult, failed, flagged, passed, skipped, warned

_SHOWN = {"libcudnn": "cudnn", "libcudart": "cuda_runtime"}  # NVIDIA's packages of the libraries whose file is named
_CUDNN_PROGRAM = """import sys
sys.path[:] = filter(None, sys.path)
import ctypes
print(ctypes.CDLL(sys.argv[1]).cudnnGetVersion())"""
_FILE_VERSION = re.compile(r"\.so\.(\d+\.\d+[\d.]*)$")


def check_libraries(installed: InstalledBuild) -> CheckResult:
    """Check where the libraries of a build for CUDA come from."""
    build = installed.build
    if not build.libraries:
        return skipped(f"The libraries of CUDA {format_version(build.cuda)} are not known.")
    search = LibrarySearch(installed.context, installed.environment)
    found = {each: search.find(each, build.search) for each in build.libraries}
    if missing := [each for each, file in found.items() if file is None]:
        return _describe_missing(installed, missing)
    shown = {each: file for each, file in found.items() if file is not None and each.partition(".")[0] in _SHOWN}
    versions = {each: _find_version(file, each, installed) for each, file in shown.items()}
    texts = [_describe(each, file, versions[each]) for each, file in shown.items()]
    text = f"{installed.title} would load {', '.join(texts)}"
    for soname, file in shown.items():
        version = versions[soname]
        if not soname.startswith("libcudnn"):
            continue
        if not version and file.by == LD_LIBRARY_PATH:
            return failed(
                f"{installed.title} would load {file.path}, which does not load or is no cuDNN.",
                "LD_LIBRARY_PATH puts it before the cuDNN that was installed for it.",
                fix=_leave_out([file.path]),
            )
        if version and not _is_cudnn_accepted(version, build.min_cudnn):
            return _describe_cudnn(installed, file, version)
    replaced = {
        each: other
        for each, file in shown.items()
        if file.by == LD_LIBRARY_PATH
        and (other := search.find(each, build.search, with_variable=False)) is not None
        and other.path.resolve() != file.path.resolve()
    }
    if replaced:
        others = ", ".join(str(each.path.parent.resolve() / each.path.name) for each in replaced.values())
        return warned(
            f"{text}: LD_LIBRARY_PATH replaces {others}.",
            f"{installed.framework.title} was tested with the libraries that were installed for it.",
            fix=_leave_out([shown[each].path for each in replaced]),
        )
    return passed(f"{text}.")


def _find_version(file: FoundLibrary, soname: str, installed: InstalledBuild) -> Version:
    """Return the version of a library, by its package in any environment, its file name or itself; empty if unknown."""
    path, package = file.path.resolve(), _SHOWN[soname.partition(".")[0]]
    for site in (folder.parent for folder in path.parents if folder.name == "nvidia"):
        for each in site.glob(f"nvidia_{package}*.dist-info"):
            if match := re.fullmatch(rf"nvidia_{package}(?:_cu\d+)?-([\d.]+)\.dist-info", each.name):
                return parse_version(match[1])
    if match := _FILE_VERSION.search(path.name):
        return parse_version(match[1])
    if file.by != LD_LIBRARY_PATH or not soname.startswith("libcudnn"):
        return ()
    try:
        answer = run_python(installed.environment.python, _CUDNN_PROGRAM, str(path), environ=installed.context.environ)
        return parse_cudnn(int(answer))
    except (InterpreterError, ValueError):
        return ()


def _describe(soname: str, file: FoundLibrary, version: Version) -> str:
    title = f"{soname} ({format_version(version)})" if version else soname
    return f"{title} from {file.path.parent.resolve()}"


def _is_cudnn_accepted(version: Version, minimum: Version) -> bool:
    """Return whether the major version is the same, and the minor one the same or higher: TensorFlow's own rule."""
    return version[:1] == minimum[:1] and version[1:2] >= minimum[1:2]


def _describe_missing(installed: InstalledBuild, missing: list[str]) -> CheckResult:
    title = installed.framework.title
    why = f"{title} then computes on the CPU; its only word on it is a line of the log."
    if installed.framework.module == "torch":
        why = "`import torch` fails."
    return flagged(
        installed.severity,
        f"{installed.title} needs libraries that are not found: {', '.join(missing)}.",
        why=why,
        fix=installed.install(),
    )


def _describe_cudnn(installed: InstalledBuild, file: FoundLibrary, version: Version) -> CheckResult:
    minimum = installed.build.min_cudnn
    return failed(
        f"{installed.title} needs cuDNN {format_version(minimum[:2])} or newer of that major version and would load "
        f"{format_version(version)} from {file.path.parent}.",
        "The first convolution fails: CUDNN_STATUS_NOT_INITIALIZED, or `Loaded runtime CuDNN library ... but "
        "source was compiled with ...`.",
        fix=_leave_out([file.path]) if file.by == LD_LIBRARY_PATH else installed.install(),
    )


def _leave_out(paths: list[Path]) -> str:
    folders = " and ".join(dict.fromkeys(str(each.parent) for each in paths))
    return f"Remove {folders} from LD_LIBRARY_PATH."
