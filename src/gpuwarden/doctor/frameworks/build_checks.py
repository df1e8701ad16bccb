"""Checks of a framework's build against the driver and the GPUs, and of its CUDA libraries."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from packaging.utils import canonicalize_name

from gpuwarden.doctor.frameworks.builds import FRAMEWORKS, BuildFileError, InstalledBuild, KnownFramework
from gpuwarden.doctor.frameworks.cuda_versions import (
    Kernels,
    accepts,
    find_kernels,
    format_version,
    name_driver,
    parse_version,
)
from gpuwarden.doctor.frameworks.environment import Environment, InterpreterError, read_environment
from gpuwarden.doctor.frameworks.installation_checks import check_installation
from gpuwarden.doctor.frameworks.loading_checks import check_libraries
from gpuwarden.doctor.frameworks.requirements import Unmet, find_unmet
from gpuwarden.doctor.model import CheckResult, CheckRow, Context, failed, flagged, passed, skipped, warned
from gpuwarden.gpu.snapshot import Gpu

MAX_NAMED = 6  # requirements in one result


def _check_build(installed: InstalledBuild) -> CheckResult:
    build = installed.build
    if not build.cuda:
        return flagged(
            installed.severity,
            f"{installed.title} is a build for {build.other or 'the CPU only'}.",
            "It cannot use an NVIDIA GPU, and says nothing about it: everything runs on the CPU.",
            fix=_replace_build(installed),
        )
    parts = [f"CUDA {format_version(build.cuda)}"]
    if build.cudnn:
        parts.append(f"cuDNN {format_version(build.cudnn)}")
    if build.targets:
        parts.append(f"kernels for {' '.join(build.targets)}")
    return passed(f"{installed.title} is built with {', '.join(parts)}.")


def _replace_build(installed: InstalledBuild) -> str:
    if installed.framework.module == "jax":  # a package next to it has the GPU's part
        return installed.install()
    names = [each for each in installed.framework.family if installed.environment.distribution(each)]
    return installed.environment.replace(names, f"'{installed.build.wanted}'")


def _check_packages(installed: InstalledBuild) -> CheckResult:
    unmet = find_unmet(installed.environment, installed.build.requirements)
    if not unmet:
        count = len(installed.build.requirements)
        return passed(f"All {count} requirements of {installed.title} are met.")
    is_broken = any(not each.installed or (each.is_major and _is_binary(each.name)) for each in unmet)
    return flagged(
        "fail" if is_broken else "warn",
        f"{installed.title} requires other packages than are installed: {_name_unmet(unmet)}.",
        "It was built and tested with these versions: others may fail at import, or in the first step on a GPU.",
        fix=_fix_packages(installed, unmet),
    )


def _fix_packages(installed: InstalledBuild, unmet: list[Unmet]) -> str:
    """Return the command that installs the packages; if they are many, by the framework's own requirements."""
    if installed.build.cuda and len(unmet) > MAX_NAMED:
        return installed.install()
    return installed.environment.pip("install", *(f"'{each.name}{each.specifier}'" for each in unmet))


def _is_binary(name: str) -> bool:
    """Return whether a framework is compiled against a package, so that another major version of it fails."""
    return name.startswith("nvidia") or canonicalize_name(name) in ("jaxlib", "ml-dtypes", "numpy", "protobuf")


def _name_unmet(unmet: list[Unmet]) -> str:
    named = ", ".join(map(str, unmet[:MAX_NAMED]))
    return named if len(unmet) <= MAX_NAMED else f"{named} and {len(unmet) - MAX_NAMED} more"


def _check_driver(installed: InstalledBuild) -> CheckResult:
    cuda = installed.build.cuda
    driver = installed.context.survey().driver
    if driver is None or not driver.cuda_version:
        return skipped("The driver does not answer, so its CUDA version is unknown.")
    found = (
        f"Driver {driver.version} is for CUDA {driver.cuda_version}, {installed.title} for CUDA {format_version(cuda)}"
    )
    accepted = accepts(driver.version, driver.cuda_version, cuda)
    if accepted == "all":
        return passed(f"{found}.")
    if accepted == "none":
        return failed(
            f"{found}: the driver is too old.",
            "CUDA does not start: the driver version is insufficient for the CUDA runtime version.",
            fix=f"Install the driver {name_driver(cuda, minimum=True)}, or a build for CUDA {driver.cuda_version}.",
        )
    by_ptx = [gpu for gpu, kernels in _match_gpus(installed) if kernels == "ptx"]
    if by_ptx:
        return failed(
            f"{found}, and the build has only PTX for {_name_gpus(by_ptx)}.",
            "No driver compiles the PTX of a newer CUDA: the first kernel fails with an unsupported PTX version.",
            fix=f"Install the driver {name_driver(cuda)}, or a build for CUDA {driver.cuda_version}.",
        )
    return passed(f"{found}: it runs by CUDA's minor version compatibility.")


def _check_gpus(installed: InstalledBuild) -> CheckResult:
    targets = installed.build.targets
    matched = _match_gpus(installed)
    if targets is None:
        return skipped(f"{installed.title} compiles its kernels for the GPU that it finds.")
    if not targets:
        return skipped(f"{installed.title} does not say which GPUs it has kernels for.")
    if not matched:
        return skipped("No GPU has given its compute capability.")
    without = [(gpu, kernels) for gpu, kernels in matched if kernels in ("too_old", "too_new")]
    if without:
        is_old = without[0][1] == "too_old"
        return failed(
            f"{installed.title} has no kernels for {_name_gpus([gpu for gpu, _ in without])}: "
            f"the GPU is too {'old' if is_old else 'new'} for this build.",
            "Each kernel fails with `no kernel image is available for execution on the device`.",
            fix=f"Install {'an older' if is_old else 'a newer'} {installed.framework.title}.",
        )
    by_ptx = [gpu for gpu, kernels in matched if kernels == "ptx"]
    if by_ptx:
        return warned(
            f"{installed.title} has only PTX for {_name_gpus(by_ptx)}.",
            "The driver compiles every kernel at its first use, for 30 minutes or longer, and keeps them in ~/.nv.",
            fix=f"Install a {installed.framework.title} with kernels for this GPU; until then keep ~/.nv and set "
            "CUDA_CACHE_MAXSIZE=4294967296.",
        )
    return passed(f"{installed.title} has kernels for {_name_gpus([gpu for gpu, _ in matched])}.")


def _match_gpus(installed: InstalledBuild) -> list[tuple[Gpu, Kernels]]:
    targets = installed.build.targets
    return [
        (gpu, find_kernels(targets, parse_version(gpu.identity.compute_capability)))
        for gpu in installed.context.survey().gpus
        if targets and gpu.identity.compute_capability
    ]


def _name_gpus(gpus: list[Gpu]) -> str:
    names = dict.fromkeys(
        f"{gpu.identity.name} (sm_{gpu.identity.compute_capability.replace('.', '')})" for gpu in gpus
    )
    return ", ".join(names)


# Name and meaning of each check of an installed framework; those after the first two are of builds for CUDA.
_PARTS: tuple[tuple[str, str, Callable[[InstalledBuild], CheckResult]], ...] = (
    ("build", "The build is for CUDA, not for the CPU only.", _check_build),
    (
        "packages",
        "The packages that it requires are installed, NVIDIA's included, in versions it allows.",
        _check_packages,
    ),
    ("driver", "The driver is new enough for the build's CUDA.", _check_driver),
    ("gpus", "The build has binaries for each GPU, not only PTX.", _check_gpus),
    (
        "libraries",
        "CUDA's libraries are found, cuDNN is new enough, and LD_LIBRARY_PATH replaces none.",
        check_libraries,
    ),
)


def _check_framework(framework: KnownFramework, context: Context) -> Iterator[CheckResult]:
    try:
        environment = read_environment(context)
    except InterpreterError:
        return  # python.environment has it
    yield replace(check_installation(framework, environment), name=f"{framework.module}.installed")
    try:
        build = framework.read(environment, context)
    except BuildFileError as error:
        yield replace(_describe_damage(framework, environment, error), name=f"{framework.module}.build")
        return
    if build is None:
        return
    installed = InstalledBuild(framework, build, environment, context)
    for part, _, check_part in _PARTS if build.cuda else _PARTS[:2]:
        yield replace(check_part(installed), name=f"{framework.module}.{part}")


def _describe_damage(framework: KnownFramework, environment: Environment, error: BuildFileError) -> CheckResult:
    names = [name for name in framework.family if environment.distribution(name)]
    return failed(
        f"The installation of {framework.title} is damaged: {error}.",
        "Importing it can fail, and nothing is known of what it is built for.",
        environment.pip("install", "--force-reinstall", "--no-deps", *(names or framework.family[:1])),
    )


def _names(framework: KnownFramework) -> dict[str, str]:
    meanings = {
        "installed": f"{framework.title} is installed once and whole, and no other file has its name.",
        **{part: meaning for part, meaning, _ in _PARTS},
    }
    return {f"{framework.module}.{part}": meaning for part, meaning in meanings.items()}


BUILD_CHECKS = tuple(CheckRow(partial(_check_framework, each), _names(each)) for each in FRAMEWORKS)
