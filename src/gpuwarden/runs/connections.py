"""The open connections of runs, and which of them goes where there are too many."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator

from gpuwarden.runs.peer import Peer


class Connections:
    """Connections by process and by user, each in the order in which they came."""

    def __init__(self) -> None:
        self._peers: dict[socket.socket, Peer] = {}
        self._of_process: dict[Peer, dict[socket.socket, None]] = {}
        self._of_user: dict[int, dict[socket.socket, None]] = {}

    def __len__(self) -> int:
        return len(self._peers)

    def __iter__(self) -> Iterator[socket.socket]:
        return iter(list(self._peers))

    def __contains__(self, connection: socket.socket) -> bool:
        return connection in self._peers

    def add(self, connection: socket.socket, peer: Peer) -> None:
        """Take a connection up."""
        self._peers[connection] = peer
        self._of_process.setdefault(peer, {})[connection] = None
        self._of_user.setdefault(peer.uid, {})[connection] = None

    def remove(self, connection: socket.socket) -> Peer:
        """Forget a connection; return whose it was."""
        peer = self._peers.pop(connection)
        del self._of_process[peer][connection]
        del self._of_user[peer.uid][connection]
        if not self._of_process[peer]:
            del self._of_process[peer]
        if not self._of_user[peer.uid]:
            del self._of_user[peer.uid]
        return peer

    def peer(self, connection: socket.socket) -> Peer:
        """Say whose a connection is."""
        return self._peers[connection]

    def of(self, peer: Peer) -> tuple[socket.socket, ...]:
        """Return the connections of a process."""
        return tuple(self._of_process.get(peer, ()))

    def least_needed(self, uid: int, is_run: Callable[[Peer], bool]) -> socket.socket | None:
        """Choose what to close so that the user `uid` may have one more; None where that one is to be turned away.

        It is of the user who has most: the oldest one of a process that is no run, else the newest that its process has
        beside another. What a run has no other of is taken only from a user with two more, lest they take turns.
        """
        own = len(self._of_user.get(uid, ()))
        crowd = max(self._of_user, key=lambda each: (len(self._of_user[each]), each == uid), default=uid)
        theirs = self._of_user.get(crowd, {})
        chosen = next((each for each in theirs if not is_run(self._peers[each])), None)
        if chosen is None:
            chosen = next((each for each in reversed(theirs) if len(self._of_process[self._peers[each]]) > 1), None)
        if chosen is None and len(theirs) >= own + 2:
            chosen = next(reversed(theirs))
        return chosen
