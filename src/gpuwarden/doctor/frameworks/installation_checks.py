"""Checks of an environment: is each framework installed once and whole, and does nothing hide it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import Distribution
from pathlib import Path

from packaging.tags import Tag, parse_tag
from packaging.utils import canonicalize_name

from gpuwarden.doctor.frameworks.builds import FRAMEWORKS, KnownFramework
from gpuwarden.doctor.frameworks.environment import Environment, InterpreterError, read_environment
from gpuwarden.doctor.frameworks.requirements import list_requirements
from gpuwarden.doctor.model import CheckResult, Context, check, failed, passed, skipped, warned

MAX_NAMED = 5  # in one result


@check("python.environment", "The interpreter of the environment runs.")
def _check_environment(context: Context) -> Iterator[CheckResult]:
    try:
        environment = read_environment(context)
    except InterpreterError as error:
        yield failed(
            f"The environment's interpreter does not run: {error}.",
            "Nothing is known of the frameworks in that environment.",
            fix="Give the interpreter of your environment: gpuwarden doctor --python ENV/bin/python.",
        )
        return
    count = len(environment.distributions)
    yield passed(f"Python {environment.version} in {environment.prefix} with {count} packages.")


def check_installation(framework: KnownFramework, environment: Environment) -> CheckResult:
    """Check that a framework is installed once and whole; `skip` if it is not installed."""
    spec = environment.find(framework.module)
    origin = None if spec is None or spec.origin is None else Path(spec.origin)
    installed = _list_family(framework, environment)
    if not installed:
        return _check_without_metadata(framework, environment, origin)
    if origin is None:
        return _describe_leftover(framework, environment, installed)
    if len({canonicalize_name(each.name) for each in installed}) > 1:
        return _describe_several(framework, environment, installed)
    if (shadow := environment.find_shadow(framework.module)) is not None:
        return failed(
            f"{shadow} hides the installed {framework.title}.",
            f"`import {framework.module}` in that folder imports this file.",
            fix=f"Rename {shadow}.",
        )
    used, *others = environment.distributions[canonicalize_name(installed[0].name)]
    if others:
        return warned(
            f"{_describe(used)} is used, and {', '.join(map(_describe, others))} is not.",
            "Two folders of the module search path have it: packages of one can be loaded with those of the other.",
            fix="Uninstall the one you do not want, and set PYTHONNOUSERSITE=1 if it is in your home folder.",
        )
    return passed(f"{framework.title} {used.version} in {origin.parent}.")


def _list_family(framework: KnownFramework, environment: Environment) -> list[Distribution]:
    """Return the distributions that install the module, without those that another of them requires."""
    found = [each for each in map(environment.distribution, framework.family) if each is not None]
    required = {
        canonicalize_name(requirement.name) for each in found for requirement in list_requirements(environment, each)
    }
    return [each for each in found if canonicalize_name(each.name) not in required]


def _describe(distribution: Distribution) -> str:
    return f"{distribution.name} {distribution.version} in {distribution.locate_file('')}"


def _check_without_metadata(framework: KnownFramework, environment: Environment, origin: Path | None) -> CheckResult:
    if origin is None:
        return skipped(f"{framework.title} is not installed in {environment.prefix}.")
    if origin.name == "__init__.py":
        return passed(f"{framework.title} in {origin.parent}, not installed by pip or conda.")
    return failed(
        f"{origin} has the name of {framework.title}, which is not installed.",
        f"`import {framework.module}` imports this file.",
        fix=f"Rename {origin}.",
    )


def _describe_leftover(
    framework: KnownFramework, environment: Environment, installed: list[Distribution]
) -> CheckResult:
    if any('"editable": true' in (each.read_text("direct_url.json") or "") for each in installed):
        return skipped(f"{framework.title} is installed in editable mode and is not checked.")
    folder = Path(str(installed[0].locate_file(framework.module)))
    names = [each.name for each in installed]
    return failed(
        f"pip lists {' '.join(names)} {installed[0].version}, but the package in {folder} has no __init__.py.",
        f"An uninstallation removed files of the other one: `import {framework.module}` finds an empty folder.",
        fix=environment.replace(names, framework.family[0], folder),
    )


def _describe_several(
    framework: KnownFramework, environment: Environment, installed: list[Distribution]
) -> CheckResult:
    names = [each.name for each in installed]
    versions = ", ".join(f"{each.name} {each.version}" for each in installed)
    folder = Path(str(installed[0].locate_file(framework.module)))
    return failed(
        f"{len(installed)} distributions are installed in one folder: {versions}.",
        "The one installed last has overwritten the others, and pip lists all: a build for the CPU may be in use.",
        fix=environment.replace(names, framework.family[0], folder),
    )


@check("python.shadows", "No file in the working folder has the name of a module that a framework needs.")
def _check_shadows(context: Context) -> Iterator[CheckResult]:
    with suppress(InterpreterError):  # python.environment has it
        yield _find_shadows(read_environment(context))


def _find_shadows(environment: Environment) -> CheckResult:
    if environment.folder is None:
        return passed("Python does not search the working folder for modules.")
    needed = environment.stdlib | {"keras", "numpy", "jaxlib"} | {each.module for each in FRAMEWORKS}
    needed |= {name.replace("-", "_") for name in _list_needed(environment)}
    entries = {each.name.partition(".")[0] for each in environment.folder.iterdir()}
    found = [path for each in sorted(needed & entries) if (path := environment.find_shadow(each)) is not None]
    hiding = [path for path in found if environment.find(path.stem if path.stem != "__init__" else path.parent.name)]
    if not hiding:
        return passed(f"No file in {environment.folder} hides a module.")
    listed = ", ".join(map(str, hiding[:MAX_NAMED]))
    return failed(
        f"Modules are hidden by files in the working folder: {listed}.",
        "A program started there imports these files in place of the modules of that name.",
        fix="Rename them.",
    )


@check("python.wheels", "The frameworks and what they require are built for the Python of the interpreter.")
def _check_wheels(context: Context) -> Iterator[CheckResult]:
    with suppress(InterpreterError):  # python.environment has it
        yield _find_foreign_wheels(read_environment(context))


def _find_foreign_wheels(environment: Environment) -> CheckResult:
    named = filter(None, map(environment.distribution, sorted(set(_list_needed(environment)))))
    foreign = {each: built for each in named if (built := _read_other_python(each, environment))}
    if not foreign:
        return passed(f"No package is built for another Python than {environment.version}.")
    listed = ", ".join(f"{_describe(each)} for {built}" for each, built in [*foreign.items()][:MAX_NAMED])
    return failed(
        f"The interpreter is Python {environment.version}, but packages are built for another one: {listed}.",
        "Python does not load their compiled modules, so importing them fails.",
        fix=environment.pip("install", "--force-reinstall", *(f"{each.name}=={each.version}" for each in foreign)),
    )


def _read_other_python(distribution: Distribution, environment: Environment) -> str:
    """Return the Python that a wheel was built for, as `cp312`; empty if it fits, or is no wheel."""
    lines = (distribution.read_text("WHEEL") or "").splitlines()
    tags = [tag for line in lines if line.startswith("Tag:") for tag in parse_tag(line[4:].strip())]
    minor = int(environment.version.split(".")[1])
    return "" if not tags or any(_fits(tag, minor) for tag in tags) else tags[0].interpreter


def _fits(tag: Tag, minor: int) -> bool:
    """Return whether Python 3.`minor` loads a wheel's modules, by PEP 425; its machine aside."""
    kind, major, number = tag.interpreter[:2], tag.interpreter[2:3], tag.interpreter[3:]
    if major != "3" or not number.isdecimal():
        return major == "3"
    return int(number) == minor or (int(number) < minor and (kind == "py" or tag.abi == "abi3"))


def _list_needed(environment: Environment) -> Iterator[str]:
    """Yield the canonical names of the installed frameworks' distributions, and of what these require."""
    for framework in FRAMEWORKS:
        for distribution in _list_family(framework, environment):
            yield canonicalize_name(distribution.name)
            yield from (canonicalize_name(each.name) for each in list_requirements(environment, distribution))


ENVIRONMENT_CHECKS = (_check_environment, _check_wheels, _check_shadows)
