"""What a page says, and under whose names: the option `compat`."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any, Protocol

from gpuwarden.config import Config
from gpuwarden.dcgm.page import DcgmPage, host_name
from gpuwarden.exposition import Entries, entries
from gpuwarden.metric import Table
from gpuwarden.state import State


class Teller(Protocol):
    """Tells what is exposed of a poll."""

    def see(self, state: State) -> None:
        """Take in a poll, whether it is scraped or not."""

    def entries(self, state: State) -> Iterable[tuple[type[Table[Any]], Entries]]:
        """Return what is exposed of the state last seen, table by table."""


class OwnNames:
    """Tells all of it under gpuwarden's names."""

    def see(self, state: State) -> None:
        """Do nothing: a poll is told by itself alone."""

    def entries(self, state: State) -> Iterable[tuple[type[Table[Any]], Entries]]:
        """See Teller."""
        return entries(state)


class BothNames:
    """Tells all of it under gpuwarden's names, and again under another exporter's."""

    def __init__(self, again: Teller) -> None:
        self._again = again

    def see(self, state: State) -> None:
        """See Teller."""
        self._again.see(state)

    def entries(self, state: State) -> Iterable[tuple[type[Table[Any]], Entries]]:
        """See Teller."""
        return chain(entries(state), self._again.entries(state))


def teller(config: Config) -> Teller:
    """Return who tells a page, by the option `compat`."""
    if config.compat == "none":
        return OwnNames()
    return BothNames(DcgmPage(host_name()))
