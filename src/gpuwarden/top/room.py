"""How the lines of a terminal are shared out among the sections of the picture."""

from __future__ import annotations

from collections.abc import Sequence


def shared_out(lines: int, wanted: Sequence[int], most_at_first: int) -> list[int]:
    """Give each section as many lines as it wants, if there are.

    Else the last one gets `most_at_first`, each of the others an equal part of the rest, and what some do not need goes
    to the others, the first first.
    """
    last = min(wanted[-1], most_at_first, max(lines, 0) // len(wanted))
    equal = (max(lines, 0) - last) // (len(wanted) - 1)
    given = [*(min(equal, each) for each in wanted[:-1]), last]
    left = max(lines, 0) - sum(given)
    for place, each in enumerate(wanted):
        more = min(each - given[place], left)
        given[place] += more
        left -= more
    return given
