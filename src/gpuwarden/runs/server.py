"""The socket that runs report to: SOCK_SEQPACKET, read on the event loop, identity by the kernel's word."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import resource
import socket
import stat
import struct
import time
from pathlib import Path

from gpuwarden.protocol import MAX_MESSAGE_BYTES, Message, ProtocolError, decode
from gpuwarden.runs.peer import Peer
from gpuwarden.runs.registry import RunRegistry

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 2048
# Messages read from one connection before the others have their turn: a run that floods delays nobody.
BURST = 32
MAX_QUEUED = 512  # more than the kernel queues on one connection (278 small messages, net.core.wmem_default 212992)
_SO_PEERPIDFD = 77  # Linux 6.5; not yet in Python's socket module (include/uapi/asm-generic/socket.h)


class SocketInUseError(OSError):
    """The socket's path cannot be taken; the text says what to do."""


class RunServer:
    """Accepts runs and hands their messages to the registry. All of it on one event loop, without threads."""

    def __init__(self, registry: RunRegistry) -> None:
        self._registry = registry
        self._listener: socket.socket | None = None
        self._path: Path | None = None
        self._inode = 0
        self._connections: dict[socket.socket, Peer] = {}
        self._pidfds: dict[str, int] = {}
        self._serial = 0
        self._limit = MAX_CONNECTIONS
        self.refused = 0

    def start(self, path: Path, mode: int) -> None:
        """Listen at `path`, reachable by whom `mode` lets write. Raises OSError with a text that says what to do."""
        _make_way(path)
        # A connection takes two descriptors with its process's: half of all there may be, the rest is for scrapes.
        self._limit = min(MAX_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        # The mode is right from the first moment; a chmod after bind would leave a gap.
        umask = os.umask(0o777 & ~mode)
        try:
            listener.bind(str(path))
            listener.listen(512)
        except OSError as error:
            listener.close()
            raise OSError(
                error.errno, f"cannot listen on {path}: {error.strerror}; choose another runs.socket"
            ) from None
        finally:
            os.umask(umask)
        self._listener, self._path, self._inode = listener, path, path.stat().st_ino
        asyncio.get_running_loop().add_reader(listener, self._accept)

    def stop(self) -> None:
        """Close everything and remove the socket, unless another daemon has put its own there since."""
        loop = asyncio.get_running_loop()
        for connection in list(self._connections):
            self._close(connection)
        for pidfd in self._pidfds.values():
            loop.remove_reader(pidfd)
            os.close(pidfd)
        self._pidfds.clear()
        if self._listener is not None and self._path is not None:
            loop.remove_reader(self._listener)
            self._listener.close()
            with contextlib.suppress(FileNotFoundError):
                if self._path.stat().st_ino == self._inode:
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
                log.warning("a run cannot be accepted: %s", error.strerror)
                self._pause(self._listener)
                return
            if max(len(self._connections), len(self._pidfds)) >= self._limit:
                connection.close()
                self.refused += 1
                continue
            connection.setblocking(False)  # noqa: FBT003 - the standard library's signature
            self._connections[connection] = self._identify(connection)
            asyncio.get_running_loop().add_reader(connection, self._read, connection)

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
        peer = Peer(pid, uid, _start_time(pid))
        if pidfd is not None:
            if peer.run_id in self._pidfds:
                os.close(pidfd)
            else:
                self._pidfds[peer.run_id] = pidfd
                asyncio.get_running_loop().add_reader(pidfd, self._exited, peer)
        return peer

    def _exited(self, peer: Peer) -> None:
        pidfd = self._pidfds.pop(peer.run_id)
        asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)
        for connection in [each for each, whose in self._connections.items() if whose == peer]:
            for _ in range(MAX_QUEUED // BURST):  # what it said last still counts
                if connection in self._connections:
                    self._read(connection)
            if connection in self._connections:  # a forked child still holds it
                self._close(connection)
        self._registry.exited(peer, time.time())

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
                self._registry.receive(peer, decode(data), time.time())
            except ProtocolError as error:
                self._reject(peer, error)
                if error.reason == "too_many_runs":  # it says hello again when it reconnects: by then there may be room
                    self._close(connection)
                    return

    def receive(self, peer: Peer, message: Message) -> None:
        """Hand on one message; one that is refused is counted."""
        try:
            self._registry.receive(peer, message, time.time())
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
        if peer.run_id in self._pidfds:
            self._registry.disconnected(peer, time.time())
        else:  # nothing watches the process: the connection's end is all there is to see
            self._registry.exited(peer, time.time())


def _who(peer: Peer) -> tuple[int, int]:
    return peer.pid, peer.uid


def _make_way(path: Path) -> None:
    """Remove a stale socket, make the directory; refuse when something alive or foreign is there."""
    try:
        path.parent.mkdir(mode=0o755, exist_ok=True)
    except OSError as error:
        raise OSError(
            error.errno,
            f"cannot create {path.parent}: {error.strerror}; run as the systemd service does, or choose another place "
            "with runs.socket, --socket or GPUWARDEN_SOCKET",
        ) from None
    try:
        kind = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(kind):
        raise SocketInUseError(errno.EEXIST, f"{path} exists and is no socket; remove it or choose another runs.socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()  # nobody listens: left behind by a daemon that was killed
            return
        except OSError as error:
            raise SocketInUseError(
                error.errno, f"{path} is in use: {error.strerror}; choose another runs.socket"
            ) from None
    raise SocketInUseError(
        errno.EADDRINUSE, f"another daemon listens on {path}; stop it or choose another runs.socket or --socket"
    )


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
