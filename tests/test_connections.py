"""Which connection goes where there are too many."""

import contextlib
import socket
from collections.abc import Iterator

import pytest

from gpuwarden.runs.connections import Connections
from gpuwarden.runs.peer import Peer

RUNS = range(100, 200)  # pids of processes that are runs


def is_run(peer: Peer) -> bool:
    """Tell whether a process of these tests is a run."""
    return peer.pid in RUNS


class Held:
    """Connections made for a test."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self.connections = Connections()

    def add(self, pid: int, uid: int) -> socket.socket:
        """Have a process connect."""
        connection = self._stack.enter_context(socket.socket(socket.AF_UNIX))
        self.connections.add(connection, Peer(pid, uid, 1))
        return connection

    def least_needed(self, uid: int) -> socket.socket | None:
        """Ask what goes for one of a user's."""
        return self.connections.least_needed(uid, is_run)


@pytest.fixture
def held() -> Iterator[Held]:
    """Hold no connections yet."""
    with contextlib.ExitStack() as stack:
        yield Held(stack)


def test_nothing_is_chosen_of_nothing(held: Held) -> None:
    """There is nothing to close where nothing is open."""
    assert held.least_needed(1) is None


def test_oldest_of_no_run_goes_first(held: Held) -> None:
    """Of the user with most connections one that says nothing goes before what runs have, for that user's too."""
    held.add(1, uid=2)
    held.add(100, uid=1)
    silent = held.add(2, uid=1)
    held.add(3, uid=1)
    held.add(100, uid=1)
    assert held.least_needed(1) is held.least_needed(2) is held.least_needed(3) is silent


def test_second_of_a_run_goes_next(held: Held) -> None:
    """A run needs one connection."""
    held.add(100, uid=1)
    second = held.add(100, uid=1)
    held.add(101, uid=1)
    held.add(102, uid=2)
    assert held.least_needed(1) is held.least_needed(2) is second


def test_runs_own_connection_goes_only_to_who_has_two_less(held: Held) -> None:
    """Users with about as many leave each other alone."""
    held.add(100, uid=1)
    newest = held.add(101, uid=1)
    assert held.least_needed(2) is newest
    held.add(102, uid=2)
    assert held.least_needed(2) is None
    assert held.least_needed(1) is None
    assert held.least_needed(3) is newest


def test_what_is_removed_is_forgotten(held: Held) -> None:
    """Nothing is left of connections that were closed."""
    first, second = held.add(100, uid=1), held.add(100, uid=1)
    assert held.connections.of(Peer(100, 1, 1)) == (first, second)
    assert held.connections.remove(first) == Peer(100, 1, 1)
    assert held.connections.of(Peer(100, 1, 1)) == (second,)
    held.connections.remove(second)
    assert (len(held.connections), list(held.connections), held.connections.of(Peer(100, 1, 1))) == (0, [], ())
    assert held.least_needed(2) is None
