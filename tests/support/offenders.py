"""One test over many cases: every case is checked, and the failure lists each one that does not hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

T = TypeVar("T")
Case = Callable[[str], AbstractContextManager[None]]


@contextmanager
def listing_offenders() -> Iterator[Case]:
    """Yield `case(name)`, a context for the assertions of one case; fail at the end with all cases that failed."""
    offenders: list[str] = []

    @contextmanager
    def case(name: str) -> Iterator[None]:
        try:
            yield
        except AssertionError as error:
            offenders.append(f"{name}: {error}")

    yield case
    assert_none(offenders)


def assert_none(offenders: Iterable[str]) -> None:
    """Fail with all offenders, if there are any."""
    found = sorted(set(offenders))
    assert not found, f"{len(found)} cases:\n" + "\n".join(found)


def check_all(cases: Mapping[str, T]) -> Callable[[Callable[[T], None]], Callable[[], None]]:
    """Decorate a check of one case: it becomes one test of all cases, by name."""

    def decorate(check: Callable[[T], None]) -> Callable[[], None]:
        def test() -> None:
            with listing_offenders() as case:
                for name, value in cases.items():
                    with case(name):
                        check(value)

        test.__name__, test.__doc__ = check.__name__, check.__doc__
        return test

    return decorate


def check_each(cases: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[[], None]]:
    """Decorate a check of one case, a tuple of its arguments or a `pytest.param`: it becomes one test of all cases."""

    def decorate(check: Callable[..., None]) -> Callable[[], None]:
        def check_one(case: Any) -> None:
            check(*getattr(case, "values", case))

        named = {f"{number} {getattr(case, 'id', '') or repr(case)[:100]}": case for number, case in enumerate(cases)}
        check_one.__name__, check_one.__doc__ = check.__name__, check.__doc__
        return check_all(named)(check_one)

    return decorate
