"""Check of the CUDA libraries that a framework would load: all are found, and cuDNN is new enough."""

from __future__ import annotations

import re
from pathlib import Path

from packaging.utils import canonicalize_name

from gpuwarden.doctor.frameworks.builds import InstalledBuild
from gpuwarden.doctor.frameworks.cuda_versions import Version, format_version, parse_version
from gpuwarden.doctor.frameworks.environment import Environment
from gpuwarden.doctor.frameworks.shared_libraries import LD_LIBRARY_PATH, FoundLibrary, LibrarySearch
from gpuwarden.doctor.model import CheckResult, failed, flagged, passed, skipped, warned

_SHOWN = {"libcudnn": "cudnn", "libcudart": "cuda-runtime"}  # NVIDIA's packages of the libraries whose file is named
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
    texts = [_describe(each, file, installed.environment) for each, file in shown.items()]
    text = f"{installed.title} would load {', '.join(texts)}"
    for soname, file in shown.items():
        version = find_version(file.path, soname, installed.environment)
        if soname.startswith("libcudnn") and version and not _is_cudnn_accepted(version, build.min_cudnn):
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


def find_version(path: Path, soname: str, environment: Environment) -> Version:
    """Return the version of a library's file, from its package or its file name; empty if unknown."""
    package, folder = _SHOWN.get(soname.partition(".")[0]), path.parent.resolve()
    for name, (distribution, *_) in environment.distributions.items() if package else ():
        is_its_package = re.fullmatch(rf"nvidia-{package}(-cu\d+)?", canonicalize_name(name))
        if is_its_package and folder.is_relative_to(Path(str(distribution.locate_file("nvidia"))).resolve()):
            return parse_version(distribution.version)
    match = _FILE_VERSION.search(path.resolve().name)
    return () if match is None else parse_version(match[1])


def _describe(soname: str, file: FoundLibrary, environment: Environment) -> str:
    version = find_version(file.path, soname, environment)
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
