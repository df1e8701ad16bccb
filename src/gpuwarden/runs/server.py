"""The socket that runs report to: SOCK_SEQPACKET, read on the event loop, identity by the kernel's word."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import socket
import struct
import time
from functools import partial
from pathlib import Path

from gpuwarden.protocol import MAX_MESSAGE_BYTES, Advice, Hello, Message, ProtocolError, decode, encode
from gpuwarden.runs.connections import Connections
from gpuwarden.runs.exit_status import exit_status
from gpuwarden.runs.listening import listen
from gpuwarden.runs.peer import Peer
from gpuwarden.runs.registry import RunRegistry
from gpuwarden.runs.rounds import Rounds

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 2048
MAX_PER_PROCESS = 8  # a run needs one
PAUSE_SECONDS = 0.05  # between rounds in which messages are read
_AT_ONCE = 16  # connections accepted, or last words of a process read, before something else has its turn
_UNREAD_BYTES = 16384  # of advice that a run may leave unread, by the kernel's account
_SO_PEERPIDFD = 77  # Linux 6.5; not yet in Python's socket module (include/uapi/asm-generic/socket.h)


class RunServer:
    """Accepts runs and hands their messages to the registry. All of it on one event loop, without threads."""

    def __init__(self, registry: RunRegistry) -> None:
        self._registry = registry
        self._listener: socket.socket | None = None
        self._path: Path | None = None
        self._mode = 0
        self._group: str | None = None
        self._inode = 0
        self._displaced = False  # the socket's place is taken, and that has been told
        self._connections = Connections()
        self._messages: Rounds
        self._news: Rounds  # new connections and ends of processes, which are not to wait
        self._pidfds: dict[Peer, int] = {}
        self._ears: dict[Peer, socket.socket] = {}  # the connection that a process hears by
        self._unexplained: dict[Peer, int] = {}  # pidfds of ended runs whose exit status is not known yet
        self._serial = 0
        self._limit = MAX_CONNECTIONS
        self.refused = 0  # connections closed for being too many

    def start(self, path: Path, mode: int, group: str | None = None) -> None:
        """Listen at `path`, reachable by whom `mode` lets write, of the `group` named.

        Raises OSError with a text that says what to do.
        """
        # A connection takes two descriptors with its process's: half of all there may be, the rest is for scrapes.
        self._limit = min(MAX_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
        self._listener = listen(path, mode, group=group)
        self._path, self._mode, self._group, self._inode = path, mode, group, path.stat().st_ino
        self._messages, self._news = Rounds(PAUSE_SECONDS), Rounds(0.0)
        self._messages.start()
        self._news.start()
        self._news.add(self._listener.fileno(), self._accept)

    def keep_listening(self) -> None:
        """Listen anew where somebody has removed the socket, say so once where that fails; called once a poll."""
        if self._listener is None or self._path is None or self._is_in_place():
            return
        try:
            listener = listen(self._path, self._mode, group=self._group)
            inode = self._path.stat().st_ino
        except OSError as error:
            if not self._displaced:
                log.error("no new run can report: %s is gone, and %s", self._path, error.strerror)  # noqa: TRY400
            self._displaced = True
            return
        while self._accept():  # those who came while it was in place
            pass
        self._news.remove(self._listener.fileno())
        self._listener.close()
        self._listener, self._inode, self._displaced = listener, inode, False
        self._news.add(listener.fileno(), self._accept)
        log.warning("%s had been removed and is there again", self._path)

    def forget_strangers(self) -> None:
        """Let go of processes that are no run any more and hold no connection; called once a poll.

        Else those that live on would keep their descriptors, until there is room for nobody.
        """
        for peer in list(self._pidfds):
            if not self._registry.knows(peer) and not self._connections.of(peer):
                self._forget_process(peer)

    def ask_again(self) -> None:
        """Ask for the exit status of runs that nobody told it of yet, as long as it counts; called once a poll."""
        for peer, pidfd in list(self._unexplained.items()):
            status = exit_status(pidfd, peer.pid, peer.start) if self._registry.awaits(peer) else None
            if status is not None:
                self._registry.exited(peer, time.monotonic(), status)
            if status is not None or not self._registry.awaits(peer):
                os.close(self._unexplained.pop(peer))

    def _is_in_place(self) -> bool:
        assert self._path is not None
        try:
            return os.stat(self._path).st_ino == self._inode  # noqa: PTH116 - a Path's own stat costs more than the call
        except OSError:
            return False

    def stop(self) -> None:
        """Close everything and remove the socket, unless another daemon has put its own there since."""
        if self._listener is None or self._path is None:
            return
        self._messages.stop()
        self._news.stop()
        for connection in self._connections:
            connection.close()
        for pidfd in (*self._pidfds.values(), *self._unexplained.values()):
            os.close(pidfd)
        self._connections = Connections()
        self._pidfds.clear()
        self._ears.clear()
        self._unexplained.clear()
        self._listener.close()
        if self._is_in_place():
            self._path.unlink()

    def _accept(self) -> bool:
        """Accept some of those who wait; tell whether there were that many."""
        assert self._listener is not None
        for _ in range(_AT_ONCE):
            try:
                connection, _address = self._listener.accept()
            except BlockingIOError:
                return False
            except OSError as error:
                # Out of file descriptors: the backlog waits, and so must we, or the loop would spin on it.
                if not self.refused:
                    log.warning("a run cannot be accepted: %s (further ones are counted only)", error.strerror)
                self.refused += 1
                self._pause(self._listener)
                return False
            connection.setblocking(False)  # noqa: FBT003 - the standard library's signature
            self._admit(connection)
        return True

    def _admit(self, connection: socket.socket) -> None:
        if _has_hung_up(connection):  # a tenth of the work where somebody does nothing else
            connection.close()
            return
        pid, uid = _credentials(connection)
        if not self._has_room(uid):
            connection.close()
            self.refused += 1
            return
        peer = self._identify(connection, pid, uid)
        self._connections.add(connection, peer)
        self._messages.add(connection.fileno(), partial(self._read, connection))
        if len(self._connections.of(peer)) > MAX_PER_PROCESS:
            self._close(connection)
            self.refused += 1

    def _has_room(self, uid: int) -> bool:
        """Make room for one of the user's, if need be."""
        if max(len(self._connections), len(self._pidfds) + len(self._unexplained)) < self._limit:
            return True
        least_needed = self._connections.least_needed(uid, self._registry.knows)
        if least_needed is None:
            return False
        self._close(least_needed)
        self.refused += 1
        return True

    def _pause(self, listener: socket.socket) -> None:
        def go_on() -> None:
            if listener is self._listener and listener.fileno() != -1:
                self._news.add(listener.fileno(), self._accept)

        self._news.remove(listener.fileno())
        asyncio.get_running_loop().call_later(1.0, go_on)

    def _identify(self, connection: socket.socket, pid: int, uid: int) -> Peer:
        """Say which process it is by the kernel's word, and watch it."""
        if pid == 0:  # outside this pid namespace: nothing to watch, so each connection stands for a run
            self._serial += 1
            return Peer(0, uid, self._serial)
        pidfd = _pidfd(connection, pid)
        start = _start_time(pid)
        peer = Peer(pid, uid, start, _unix_time(start) if start else None)
        if pidfd is not None:
            if peer in self._pidfds:
                os.close(pidfd)
            else:
                self._pidfds[peer] = pidfd
                self._news.add(pidfd, partial(self._exited, peer))
        return peer

    def _exited(self, peer: Peer) -> None:
        """Take what a process said last, a part at each call, and then its end."""
        for connection in self._connections.of(peer):
            for _ in range(_AT_ONCE):
                if not self._read(connection):
                    break
            else:
                return  # there may be more, and this is called again
            if connection in self._connections:  # a forked child still holds it
                self._close(connection)
        pidfd = self._pidfds.pop(peer, None)
        if pidfd is None:  # it was no run, and went with its connection
            return
        self._news.remove(pidfd)
        status = exit_status(pidfd, peer.pid, peer.start)
        self._registry.exited(peer, time.monotonic(), status)
        if status is None and self._registry.awaits(peer):
            self._unexplained[peer] = pidfd
        else:
            os.close(pidfd)

    def _read(self, connection: socket.socket) -> bool:
        """Read one message; tell whether there may be more."""
        try:
            data = connection.recv(MAX_MESSAGE_BYTES + 1)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self._close(connection)
            return False
        peer = self._connections.peer(connection)
        try:
            message = decode(data)
            self._registry.receive(peer, message, time.monotonic())
            if isinstance(message, Hello):
                self._note_ear(connection, peer, message)
            while self._registry.displaced:
                self._hang_up(self._registry.displaced.pop())
        except ProtocolError as error:
            self._reject(peer, error)
            if error.reason in ("too_many_runs", "no_hello"):  # a run that reconnects says hello, and may have room
                self._close(connection)
                return False
        return True

    def _note_ear(self, connection: socket.socket, peer: Peer, hello: Hello) -> None:
        if not hello.hears:
            if self._ears.get(peer) is connection:
                del self._ears[peer]
        elif self._ears.get(peer) is not connection:
            # One that never reads costs the kernel no more than this.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNREAD_BYTES)
            self._ears[peer] = connection
            self._registry.connects_anew(peer)

    def send(self, peer: Peer, advice: Advice) -> bool:
        """Give a run advice, without blocking; tell whether its connection took it."""
        connection = self._ears.get(peer)
        if connection is None:
            return False
        try:
            connection.send(encode(advice), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except OSError:  # it does not read, or has hung up, which the next read finds
            return False
        return True

    def receive(self, peer: Peer, message: Message) -> None:
        """Hand on one message; one that is refused is counted."""
        try:
            self._registry.receive(peer, message, time.monotonic())
        except ProtocolError as error:
            self._reject(peer, error)

    def _reject(self, peer: Peer, error: ProtocolError) -> None:
        if not self._registry.rejected[error.reason]:
            log.warning(
                "pid=%d uid=%d message rejected: %s (further ones of this kind are counted only)", *_who(peer), error
            )
        self._registry.rejected[error.reason] += 1

    def _close(self, connection: socket.socket) -> None:
        self._messages.remove(connection.fileno())
        peer = self._connections.remove(connection)
        connection.close()
        if self._ears.get(peer) is connection:
            del self._ears[peer]
        if self._connections.of(peer):
            return
        if not self._registry.knows(peer):
            self._forget_process(peer)
        elif peer in self._pidfds:
            self._registry.disconnected(peer, time.monotonic())
        else:  # nothing watches the process: the connection's end is all there is to see
            self._registry.exited(peer, time.monotonic())

    def _hang_up(self, peer: Peer) -> None:
        for connection in self._connections.of(peer):
            self._close(connection)

    def _forget_process(self, peer: Peer) -> None:
        pidfd = self._pidfds.pop(peer, None)
        if pidfd is not None:
            self._news.remove(pidfd)
            os.close(pidfd)


def _has_hung_up(connection: socket.socket) -> bool:
    try:
        return not connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _credentials(connection: socket.socket) -> tuple[int, int]:
    """Return the pid and uid of who connected, by the kernel's word."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _gid = struct.unpack("3i", credentials)
    return pid, uid


def _who(peer: Peer) -> tuple[int, int]:
    return peer.pid, peer.uid


def _pidfd(connection: socket.socket, pid: int) -> int | None:
    """Return a descriptor of the peer's process; None when it is gone already."""
    try:
        return connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)  # no race with a reused pid
    except OSError:
        pass
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def _start_time(pid: int) -> int:
    """Return the process's start in clock ticks since boot (proc(5), stat field 22); 0 when it is hidden or gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return 0
    return int(fields[19])


def _unix_time(start: int) -> float:
    """Turn a start in clock ticks since boot into Unix time."""
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + start / os.sysconf("SC_CLK_TCK")
