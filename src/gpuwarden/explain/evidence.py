"""Evidence on this machine for the causes of a problem, from the doctor's checks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from gpuwarden.doctor.model import CheckResult, Context
from gpuwarden.doctor.runner.checks import run_checks
from gpuwarden.errors.problems import FRAMEWORK_REGEXES, MOMENT_PREFIX, Cause, Problem


@dataclass(frozen=True, slots=True)
class WeighedCause:
    """Cause with the results of its checks: `confirmed` by a failed one or a warning, `contradicted` if all pass."""

    text: str
    results: tuple[CheckResult, ...]

    @property
    def confirmed(self) -> bool:
        """True if a check found it."""
        return any(each.status in {"fail", "warn"} for each in self.results)

    @property
    def contradicted(self) -> bool:
        """True if its checks ran and found nothing."""
        return bool(self.results) and not self.confirmed


def weigh_causes(problem: Problem, text: str, context: Context | None) -> list[WeighedCause]:
    """Return the causes of a problem, the likeliest first; without a context in the order of the table.

    `text` is that of the errors: of the frameworks only those that it names are checked. Memory that is free now is no
    evidence against a cause.
    """
    if context is None:
        return [WeighedCause(cause.text, ()) for cause in problem.causes]
    named = [name for name, regex in FRAMEWORK_REGEXES.items() if re.search(regex, text, re.IGNORECASE)]
    names = {cause: tuple(_expand(cause, named or FRAMEWORK_REGEXES)) for cause in problem.causes}
    wanted = {name for each in names.values() for name in each}
    results = [each for each in run_checks(context, wanted) if _is_evidence(each)] if wanted else []
    weighed = [
        WeighedCause(cause.text, tuple(each for each in results if each.name in names[cause]))
        for cause in problem.causes
    ]
    return sorted(weighed, key=lambda cause: (not cause.confirmed, cause.contradicted))


def _is_evidence(result: CheckResult) -> bool:
    """Return whether a result is evidence for or against a past error."""
    return result.status != "skip" and not (result.status == "pass" and result.name.startswith(MOMENT_PREFIX))


def _expand(cause: Cause, frameworks: Iterable[str]) -> Iterator[str]:
    for check in cause.checks:
        subject, _, what = check.partition(".")
        if subject == "framework":
            yield from (f"{framework}.{what}" for framework in frameworks)
        else:
            yield check
