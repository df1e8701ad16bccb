"""Requirements of an installed distribution that the environment does not meet, by the distribution's own metadata."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import Distribution
from typing import cast

from packaging.markers import default_environment
from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from gpuwarden.doctor.frameworks.environment import Environment

_LAST = 9999  # minor version above those of any release


@dataclass(frozen=True)
class Unmet:
    """A requirement that is not met. `installed` is empty if the distribution is missing.

    `is_major` is true if no version of the installed major version would do.
    """

    name: str
    specifier: str
    installed: str
    is_major: bool

    def __str__(self) -> str:
        """Return it in words."""
        return f"{self.name}{self.specifier} ({self.installed or 'missing'})"


def list_requirements(
    environment: Environment, distribution: Distribution, extras: Iterable[str] = ()
) -> Iterator[Requirement]:
    """Yield what a distribution requires here, and what it requires of the extras of others (torch: cuda-toolkit)."""
    variables = cast("dict[str, str]", dict(default_environment()))  # of this interpreter: the same machine
    variables |= {
        "python_full_version": environment.version,
        "python_version": ".".join(environment.version.split(".")[:2]),
    }
    for text in distribution.requires or ():
        try:
            requirement = Requirement(text)
        except InvalidRequirement:  # of old metadata; pip warns of it
            continue
        if not _applies(requirement, variables, extras):
            continue
        yield requirement
        other = environment.distribution(canonicalize_name(requirement.name)) if requirement.extras else None
        if other is not None:
            yield from list_requirements(environment, other, requirement.extras)


def find_unmet(environment: Environment, requirements: Iterable[Requirement]) -> list[Unmet]:
    """Return those that are not met, each once."""
    found = []
    for each in {str(each): each for each in requirements}.values():
        other = environment.distribution(canonicalize_name(each.name))
        if other is None:
            found.append(Unmet(each.name, str(each.specifier), "", is_major=True))
        elif _is_version(other.version) and not each.specifier.contains(other.version, prereleases=True):
            is_major = not _has_major(each.specifier, other.version)
            found.append(Unmet(each.name, str(each.specifier), other.version, is_major))
    return found


def _applies(requirement: Requirement, variables: Mapping[str, str], extras: Iterable[str]) -> bool:
    if requirement.marker is None:
        return True
    return any(
        requirement.marker.evaluate(cast("dict[str, str]", {**variables, "extra": extra})) for extra in ("", *extras)
    )


def _is_version(text: str) -> bool:
    try:
        Version(text)
    except InvalidVersion:  # of a build outside pip
        return False
    return True


def _has_major(specifiers: SpecifierSet, version: str) -> bool:
    major = Version(version).major
    named = [each.version.removesuffix(".*") for each in specifiers]
    candidates = [f"{major}.0", f"{major}.{_LAST}", *(each for each in named if Version(each).major == major)]
    return any(specifiers.contains(each, prereleases=True) for each in candidates)
