"""Server of the runs socket: SOCK_SEQPACKET on the event loop, with the peer's identity from the kernel."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gpuwarden.fairness.fair_eviction import find_user_with_most
from gpuwarden.fairness.subordinate_uids import find_user
from gpuwarden.formatting import format_fields
from gpuwarden.host.exit_status import read_exit_status
from gpuwarden.host.process_key import ProcessKey, identify_peer
from gpuwarden.host.unix_socket import BACKLOG, listen
from gpuwarden.protocol.codec import ProtocolError, decode, encode, receive_packet
from gpuwarden.protocol.messages import End, Hello, Message, Reply
from gpuwarden.protocol.socket_trust import read_credentials
from gpuwarden.runs.registry import RunRegistry

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 2048
MAX_CONNECTIONS_PER_PROCESS = 8  # a run needs one
_SETTINGS = "runs.socket, --socket or GPUWARDEN_SOCKET"
MESSAGE_BATCH = 16  # messages read from one connection at a time
ACCEPT_BATCH = BACKLOG  # with less, a flood of clients keeps the queue full and others out
REST_SECONDS = 0.02  # after a full batch: at most 800 messages a second from one client
MAX_FLOOD_RATIO = 0.5  # share of the event loop's time for clients that never pause; polls need the rest
MAX_LAST_MESSAGES = 1024  # read from a connection before it is closed; with 212,992 bytes the kernel queues 280
MAX_STOP_SECONDS = 1.0  # for which the last messages of all runs are read when the daemon stops
NO_DESCRIPTOR_REST_SECONDS = 1.0
UNREAD_ADVICE_BYTES = 16384  # kernel queue for a run that does not read
# Their connection is closed: a run that reconnects says hello, and may have room then.
_RECONNECT_REASONS = ("too_many_runs", "too_many_new_runs", "no_hello")


@dataclass(slots=True)
class _Client:
    """Process at the other end of a connection, and the number of messages read from it."""

    peer: ProcessKey
    messages_read: int = 0


class RunServer:
    """Server that accepts runs and passes their messages to the registry; on one event loop, without threads."""

    def __init__(self, registry: RunRegistry, request_poll: Callable[[], object] = lambda: None) -> None:
        self._registry = registry
        self._request_poll = request_poll  # early
        self._listener: socket.socket | None = None
        self._path = Path()
        self._mode = 0
        self._group: str | None = None
        self._inode = 0
        self._displaced = False  # the socket cannot be restored, already logged
        self._connections: dict[socket.socket, _Client] = {}  # oldest first
        self._of_process: dict[ProcessKey, list[socket.socket]] = {}  # likewise
        self._pidfds: dict[ProcessKey, int] = {}
        self._advised: dict[ProcessKey, socket.socket] = {}  # the connection on which a process reads advice
        self._unexplained: dict[ProcessKey, int] = {}  # pidfds of ended runs with an unknown exit status
        self._serial = 0
        self._paced_until = 0.0  # monotonic time until which full batches have used their share of the event loop
        self._limit = MAX_CONNECTIONS
        self.refused = 0  # connections closed or not accepted because there were too many
        self.lost = 0  # messages sent but not read

    def start(self, path: Path, mode: int, group: str | None = None) -> None:
        """Listen at `path` with `mode` and the group named `group`. Raises OSError with the fix in its text."""
        # A connection takes two descriptors, one for its process; half of all are left for scrapes.
        self._limit = min(MAX_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
        self._path, self._mode, self._group = path, mode, group
        self._listen()

    def stop(self) -> None:
        """Read what runs have sent, close everything and remove the socket, unless another daemon has replaced it.

        Blocks for MAX_STOP_SECONDS, and as long as it takes to count the messages that were not read by then.
        """
        if self._listener is None:
            return
        self._accept_waiting(self._listener)
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._listener)
        self._listener.close()
        end = time.monotonic() + MAX_STOP_SECONDS
        for connection in list(self._connections):
            if connection in self._connections and time.monotonic() < end:
                self._read_last_messages(connection)
        for connection in self._connections:
            self._shut(connection)
        for pidfd in self._pidfds.values():
            loop.remove_reader(pidfd)
        for pidfd in (*self._pidfds.values(), *self._unexplained.values()):
            os.close(pidfd)
        self._listener = None
        for held in (self._connections, self._of_process, self._pidfds, self._advised, self._unexplained):
            held.clear()
        if self._is_in_place():
            self._path.unlink()

    def maintain(self) -> None:
        """Restore a removed socket, read exit statuses, release ended processes; called once a poll."""
        if self._listener is not None and not self._is_in_place():
            self._restore(self._listener)
        for peer, pidfd in list(self._unexplained.items()):
            status = read_exit_status(pidfd, peer.pid, peer.start) if self._registry.awaits_exit_status(peer) else None
            if status is not None:
                self._registry.exited(peer, time.monotonic(), status)
            if status is not None or not self._registry.awaits_exit_status(peer):
                os.close(self._unexplained.pop(peer))
        for peer in list(self._pidfds):  # the process of an ended run may live on for long
            if peer not in self._of_process and not self._registry.knows(peer):
                self._release_process(peer)

    def _listen(self) -> None:
        listener = listen(
            self._path, self._mode, socket.SOCK_SEQPACKET, "runs.socket", settings=_SETTINGS, group=self._group
        )
        self._inode, self._listener = self._path.stat().st_ino, listener
        asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    def _restore(self, former: socket.socket) -> None:
        """Listen again after the socket's file was removed; log a failure once."""
        try:
            self._listen()
        except OSError as error:
            if not self._displaced:
                log.error(  # noqa: TRY400 - an event
                    "runs socket was removed and cannot be restored, new runs cannot connect %s",
                    format_fields(path=self._path, error=error.strerror),
                )
            self._displaced = True
            return
        self._accept_waiting(former)
        asyncio.get_running_loop().remove_reader(former)
        former.close()
        self._displaced = False
        log.warning("runs socket was removed, restored %s", format_fields(path=self._path))

    def _is_in_place(self) -> bool:
        try:
            return self._path.stat().st_ino == self._inode
        except OSError:
            return False

    def _rest(self, reader: socket.socket, callback: Callable[[socket.socket], object], seconds: float) -> None:
        """Stop watching a socket for some seconds, so that a flood does not block other work."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(reader)

        def resume() -> None:
            if reader is self._listener or reader in self._connections:
                loop.add_reader(reader, callback, reader)

        loop.call_later(seconds, resume)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(ACCEPT_BATCH):
            try:
                if not self._accept_one(listener):
                    return
            except OSError as error:  # no file descriptors left
                if not self.refused:
                    log.warning(
                        "cannot accept a run, further failures are only counted %s", format_fields(error=error.strerror)
                    )
                self.refused += 1
                self._rest(listener, self._accept, NO_DESCRIPTOR_REST_SECONDS)
                return
        self._rest(listener, self._accept, REST_SECONDS)

    def _accept_waiting(self, listener: socket.socket) -> None:
        """Accept the clients that connected before a socket is closed."""
        with contextlib.suppress(OSError):
            for _ in range(BACKLOG + 1):
                if not self._accept_one(listener):
                    return

    def _accept_one(self, listener: socket.socket) -> bool:
        """Accept one connection; return whether there was one. Raises OSError without free descriptors."""
        try:
            connection, _address = listener.accept()
        except BlockingIOError:
            return False
        connection.setblocking(False)  # noqa: FBT003 - the standard library's signature
        if _has_hung_up(connection):  # a tenth of the work, where a client does nothing else
            connection.close()
            return True
        pid, uid = read_credentials(connection)
        self._make_room(uid)
        peer = self._identify(connection, pid, uid)
        self._connections[connection] = _Client(peer)
        own = self._of_process.setdefault(peer, [])
        own.append(connection)
        asyncio.get_running_loop().add_reader(connection, self._read, connection)
        if len(own) > MAX_CONNECTIONS_PER_PROCESS:
            self._refuse(own[0])
        return True

    def _make_room(self, uid: int) -> None:
        """Close the oldest connection of the user with the most, where there is no room for another of `uid`."""
        if max(len(self._connections), len(self._pidfds) + len(self._unexplained)) < self._limit:
            return
        crowd = find_user_with_most((each.peer.uid for each in self._connections.values()), newcomer=uid)
        clients = self._connections.items()
        oldest = next((connection for connection, each in clients if find_user(each.peer.uid) == crowd), None)
        if oldest is not None:
            self._refuse(oldest)

    def _refuse(self, connection: socket.socket) -> None:
        self._close(connection)
        self.refused += 1

    def _identify(self, connection: socket.socket, pid: int, uid: int) -> ProcessKey:
        """Return which process has connected, and watch it."""
        if pid == 0:  # outside this pid namespace: nothing to watch, so each connection stands for a run
            if not self._serial:
                log.warning("runs outside this pid namespace have no device memory or outcome; --pid=host adds them")
            self._serial += 1
            return ProcessKey(0, uid, self._serial)
        peer, pidfd = identify_peer(connection, pid, uid)
        if pidfd is not None:
            if peer in self._pidfds:
                os.close(pidfd)
            else:
                self._pidfds[peer] = pidfd
                asyncio.get_running_loop().add_reader(pidfd, self._exited, peer)
        return peer

    def _exited(self, peer: ProcessKey) -> None:
        """Read the last messages of a process, and then report its end."""
        for connection in self._of_process.get(peer, [])[:]:
            self._read_last_messages(connection)
            if connection in self._connections:  # a forked child still holds it
                self._close(connection)
        pidfd = self._pidfds.pop(peer, None)
        if pidfd is None:  # it was no run, and was released with its connection
            return
        asyncio.get_running_loop().remove_reader(pidfd)
        status = read_exit_status(pidfd, peer.pid, peer.start)
        self._registry.exited(peer, time.monotonic(), status)
        if status is None and self._registry.awaits_exit_status(peer):
            self._unexplained[peer] = pidfd
        else:
            os.close(pidfd)
        if status:  # it failed: an incident is written before the host may crash
            self._request_poll()

    def _read_last_messages(self, connection: socket.socket) -> None:
        for _ in range(MAX_LAST_MESSAGES):
            if not self._read_one(connection):
                return

    def _read(self, connection: socket.socket) -> None:
        began = time.monotonic()
        for _ in range(MESSAGE_BATCH):
            if not self._read_one(connection):
                return
        now = time.monotonic()
        self._paced_until = max(self._paced_until, now) + (now - began) / MAX_FLOOD_RATIO
        self._rest(connection, self._read, max(REST_SECONDS, self._paced_until - now))

    def _read_one(self, connection: socket.socket) -> bool:
        """Read one message; return whether there may be more."""
        try:
            data = receive_packet(connection)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self._close(connection)
            return False
        client = self._connections[connection]
        client.messages_read += 1
        peer = client.peer
        try:
            message = decode(data)
            self._hand_over(peer, message)
            if isinstance(message, Hello):
                self._set_advised(connection, peer, message)
            elif isinstance(message, End) and message.sent is not None:
                # A cross-check: the kernel loses none. Untrusted, so it counts once, and at most MAX_LAST_MESSAGES.
                self._count_lost(peer, min(message.sent - client.messages_read, MAX_LAST_MESSAGES))
                client.messages_read = sys.maxsize
            while self._registry.displaced:
                for each in self._of_process.get(self._registry.displaced.pop(), [])[:]:
                    self._close(each)
        except ProtocolError as error:
            self._reject(peer, error)
            if error.reason in _RECONNECT_REASONS:
                self._close(connection)
        return connection in self._connections

    def _set_advised(self, connection: socket.socket, peer: ProcessKey, hello: Hello) -> None:
        if not hello.hears:
            if self._advised.get(peer) is connection:
                del self._advised[peer]
        elif self._advised.get(peer) is not connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNREAD_ADVICE_BYTES)
            self._advised[peer] = connection
            if self._registry.reconnect_advice(peer):
                self._request_poll()

    def send(self, peer: ProcessKey, reply: Reply) -> bool:
        """Send a message to a run, without blocking; return whether its connection took it."""
        connection = self._advised.get(peer)
        try:
            if connection is not None:
                connection.send(encode(reply), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
                return True
        except OSError:  # it does not read, or has hung up, which the next read finds
            pass
        return False

    def receive(self, peer: ProcessKey, message: Message) -> None:
        """Handle one message that did not come through the socket; count it if it is rejected."""
        try:
            self._hand_over(peer, message)
        except ProtocolError as error:
            self._reject(peer, error)

    def _hand_over(self, peer: ProcessKey, message: Message) -> None:
        if self._registry.receive(peer, message, time.monotonic()):
            self._request_poll()

    def _reject(self, peer: ProcessKey, error: ProtocolError) -> None:
        if not self._registry.rejected[error.reason]:
            log.warning(
                "message rejected, further ones of this kind are only counted %s",
                format_fields(pid=peer.pid, uid=peer.uid, error=error),
            )
        self._registry.rejected[error.reason] += 1

    def _count_lost(self, peer: ProcessKey, number: int) -> None:
        if number <= 0:
            return
        if not self.lost:
            log.warning(
                "messages of a run lost, further ones are only counted %s",
                format_fields(pid=peer.pid, uid=peer.uid, messages=number),
            )
        self.lost += number

    def _shut(self, connection: socket.socket) -> None:
        """Close a connection's socket, and count the messages that nothing has read."""
        asyncio.get_running_loop().remove_reader(connection)
        self._count_lost(self._connections[connection].peer, _count_unread(connection))
        connection.close()

    def _close(self, connection: socket.socket) -> None:
        self._shut(connection)
        peer = self._connections.pop(connection).peer
        self._of_process[peer].remove(connection)
        if self._advised.get(peer) is connection:
            del self._advised[peer]
        if self._of_process[peer]:
            return
        del self._of_process[peer]
        if not self._registry.knows(peer):
            self._release_process(peer)
        elif peer in self._pidfds:
            self._registry.disconnected(peer, time.monotonic())
        else:  # the process is not watched: use the end of its connection
            self._registry.exited(peer, time.monotonic())

    def _release_process(self, peer: ProcessKey) -> None:
        pidfd = self._pidfds.pop(peer, None)
        if pidfd is not None:
            asyncio.get_running_loop().remove_reader(pidfd)
            os.close(pidfd)


def _count_unread(connection: socket.socket) -> int:
    """Accept no further messages on a connection; return how many it holds, and drop them."""
    number = 0
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RD)
        while receive_packet(connection):
            number += 1
    return number


def _has_hung_up(connection: socket.socket) -> bool:
    try:
        return not connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True
