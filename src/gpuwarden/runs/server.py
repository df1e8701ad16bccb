"""The socket that runs report to: SOCK_SEQPACKET, read on the event loop, identity by the kernel's word."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import socket
import struct
import time
from pathlib import Path

from gpuwarden.protocol import MAX_MESSAGE_BYTES, Message, ProtocolError, decode
from gpuwarden.runs.exit_status import exit_status
from gpuwarden.runs.listening import listen
from gpuwarden.runs.peer import Peer
from gpuwarden.runs.registry import RunRegistry

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 2048
MAX_PER_PROCESS = 8  # a run needs one
# Messages read from one connection before the others have their turn: a run that floods delays nobody.
BURST = 32
MAX_QUEUED = 512  # more than the kernel queues on one connection (278 small messages, net.core.wmem_default 212992)
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
        self._connections: dict[socket.socket, Peer] = {}
        self._pidfds: dict[Peer, int] = {}
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
        asyncio.get_running_loop().add_reader(self._listener, self._accept)

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
        loop = asyncio.get_running_loop()
        self._accept()  # those who came while it was in place
        loop.remove_reader(self._listener)
        self._listener.close()
        self._listener, self._inode, self._displaced = listener, inode, False
        loop.add_reader(listener, self._accept)
        log.warning("%s had been removed and is there again", self._path)

    def forget_strangers(self) -> None:
        """Let go of processes that are no run any more and hold no connection; called once a poll.

        Else those that live on would keep their descriptors, until there is room for nobody.
        """
        connected = set(self._connections.values())
        for peer in [each for each in self._pidfds if each not in connected and not self._registry.knows(each)]:
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
            return self._path.stat().st_ino == self._inode
        except OSError:
            return False

    def stop(self) -> None:
        """Close everything and remove the socket, unless another daemon has put its own there since."""
        loop = asyncio.get_running_loop()
        for connection in list(self._connections):
            self._close(connection)
        for pidfd in self._pidfds.values():
            loop.remove_reader(pidfd)
            os.close(pidfd)
        self._pidfds.clear()
        for pidfd in self._unexplained.values():
            os.close(pidfd)
        self._unexplained.clear()
        if self._listener is not None and self._path is not None:
            loop.remove_reader(self._listener)
            self._listener.close()
            if self._is_in_place():
                self._path.unlink()

    def _accept(self) -> None:
        assert self._listener is not None
        for _ in range(BURST):
            try:
                connection, _address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                # Out of file descriptors: the backlog waits, and so must we, or the loop would spin on it.
                if not self.refused:
                    log.warning("a run cannot be accepted: %s (further ones are counted only)", error.strerror)
                self.refused += 1
                self._pause(self._listener)
                return
            connection.setblocking(False)  # noqa: FBT003 - the standard library's signature
            if self._has_room():
                self._admit(connection)
            else:
                connection.close()
                self.refused += 1

    def _admit(self, connection: socket.socket) -> None:
        peer = self._identify(connection)
        self._connections[connection] = peer
        asyncio.get_running_loop().add_reader(connection, self._read, connection)
        if sum(peer == other for other in self._connections.values()) > MAX_PER_PROCESS:
            self._close(connection)
            self.refused += 1

    def _has_room(self) -> bool:
        """Make room, if need be, by closing the oldest connection that has not become a run."""
        if max(len(self._connections), len(self._pidfds) + len(self._unexplained)) < self._limit:
            return True
        silent = next((each for each, peer in self._connections.items() if not self._registry.knows(peer)), None)
        if silent is None:
            return False
        self._close(silent)
        self.refused += 1
        return True

    def _pause(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(listener)
        loop.call_later(1.0, lambda: listener.fileno() != -1 and loop.add_reader(listener, self._accept))

    def _identify(self, connection: socket.socket) -> Peer:
        """Take the peer's identity from the kernel, and watch its process."""
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid, uid, _gid = struct.unpack("3i", credentials)
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
                asyncio.get_running_loop().add_reader(pidfd, self._exited, peer)
        return peer

    def _exited(self, peer: Peer) -> None:
        pidfd = self._pidfds.pop(peer)
        asyncio.get_running_loop().remove_reader(pidfd)
        status = exit_status(pidfd, peer.pid, peer.start)
        for connection in [each for each, whose in self._connections.items() if whose == peer]:
            for _ in range(MAX_QUEUED // BURST):  # what it said last still counts
                if connection in self._connections:
                    self._read(connection)
            if connection in self._connections:  # a forked child still holds it
                self._close(connection)
        self._registry.exited(peer, time.monotonic(), status)
        if status is None and self._registry.awaits(peer):
            self._unexplained[peer] = pidfd
        else:
            os.close(pidfd)

    def _read(self, connection: socket.socket) -> None:
        peer = self._connections[connection]
        for _ in range(BURST):
            try:
                data = connection.recv(MAX_MESSAGE_BYTES + 1)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._close(connection)
                return
            try:
                self._registry.receive(peer, decode(data), time.monotonic())
            except ProtocolError as error:
                self._reject(peer, error)
                if error.reason in ("too_many_runs", "no_hello"):  # a run that reconnects says hello, and may have room
                    self._close(connection)
                    return

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
        peer = self._connections.pop(connection)
        asyncio.get_running_loop().remove_reader(connection)
        connection.close()
        if peer in self._connections.values():
            return
        if not self._registry.knows(peer):
            self._forget_process(peer)
        elif peer in self._pidfds:
            self._registry.disconnected(peer, time.monotonic())
        else:  # nothing watches the process: the connection's end is all there is to see
            self._registry.exited(peer, time.monotonic())

    def _forget_process(self, peer: Peer) -> None:
        pidfd = self._pidfds.pop(peer, None)
        if pidfd is not None:
            asyncio.get_running_loop().remove_reader(pidfd)
            os.close(pidfd)


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
