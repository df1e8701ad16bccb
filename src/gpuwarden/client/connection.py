"""Connection of the training process to the daemon. It never waits, never raises, and training works without it.

There is no retry loop and no thread: it reconnects when there is a message to send and the retry delay has passed. A
lost report costs nothing: the next one has the same totals.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import socket
import time
import weakref
from collections.abc import Callable
from typing import Any

from gpuwarden.client.guard import log_safely
from gpuwarden.protocol.codec import ProtocolError, decode_reply, encode, receive_packet
from gpuwarden.protocol.messages import End, EndOutcome, Hello, Message, Reply
from gpuwarden.protocol.socket_trust import find_distrust, find_foreign_link, read_credentials

MIN_RETRY_SECONDS = 1.0  # first delay between attempts to connect; doubles up to MAX_RETRY_SECONDS
MAX_RETRY_SECONDS = 30.0
MAX_RECEIVED = 4  # messages that one call reads; the others wait for the next call


class DaemonConnection:
    """Non-blocking SOCK_SEQPACKET connection that sends `hello` first each time it connects.

    `dropped` counts messages for which the queue was full, or which were too long. A forked child's copy is closed and
    stays closed; a pickled or copied one starts unconnected.
    """

    def __init__(self, path: str, hello: Hello, clock: Callable[[], float] = time.monotonic) -> None:
        self.path = path
        self.dropped = 0
        self._hello = hello
        self._clock = clock
        self._sent = 0  # messages that this connection has carried
        self._socket: socket.socket | None = None
        self._file: os.stat_result | None = None  # identity of the socket's file
        self._connected_at = 0.0
        self._retry_at = -1.0
        self._delay = MIN_RETRY_SECONDS
        self._pid = os.getpid()
        self._logged: set[int] = set()  # levels
        self._owes_hello = False  # the queue was full when it was sent, and no other message has its fields
        _connections.add(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return DaemonConnection, (self.path, self._hello)

    def set_hello(self, hello: Hello) -> None:
        """Set the hello, and send it at once if the daemon has received another one."""
        if hello != self._hello:
            self._hello = hello
            if self._socket is not None:
                self._owes_hello = True
                self._introduce()

    def send(self, message: Message) -> bool:
        """Send one message to the daemon; return whether it was sent."""
        return self._introduce() and self._send_now(message)

    def end(self, reason: str, outcome: EndOutcome) -> None:
        """Send the run's end, and close the connection permanently."""
        if self._introduce():
            self._send_now(End(reason, outcome, sent=self._sent + 1, dropped=self.dropped))
        self.close()

    def is_connected(self) -> bool:
        """Return whether there is a connection, as of the last message sent or received."""
        return self._socket is not None

    def receive(self) -> list[Reply]:
        """Return up to MAX_RECEIVED waiting messages of the daemon. Never waits.

        An unknown message is dropped: a newer daemon may send others.
        """
        replies: list[Reply] = []
        for _ in range(MAX_RECEIVED):
            if self._socket is None or self._pid != os.getpid():
                break
            try:
                data = receive_packet(self._socket, socket.MSG_DONTWAIT) if self._is_ours() else b""
            except BlockingIOError:  # no message waits
                break
            except OSError:
                data = b""
            if not data:  # the daemon is gone
                self._lose()
                break
            with contextlib.suppress(ProtocolError):
                replies.append(decode_reply(data))
        return replies

    def wait_for_room(self, seconds: float) -> None:
        """Wait until a full queue has room, at most `seconds`; return at once without a daemon."""
        if self._socket is not None and self._pid == os.getpid():
            room = select.poll()
            room.register(self._socket, select.POLLOUT)
            room.poll(seconds * 1000)

    def wait_for_message(self, seconds: float) -> bool:
        """Wait for a message of the daemon, at most `seconds`; return whether there is one, or the daemon is gone."""
        if self._socket is None or self._pid != os.getpid():
            return False
        arrived = select.poll()
        arrived.register(self._socket, select.POLLIN)
        return bool(arrived.poll(seconds * 1000))

    def close(self) -> None:
        """Close the connection permanently."""
        self._drop()
        self._retry_at = float("inf")

    def _introduce(self) -> bool:
        """Connect, and send a hello that the daemon lacks; return whether it has the hello."""
        if not self._connect():
            return False
        if self._owes_hello:
            self._owes_hello = not self._send_now(self._hello)
        return not self._owes_hello

    def _connect(self) -> bool:
        if self._pid != os.getpid():
            return False  # a forked child makes its own run
        if self._socket is None and self._clock() >= self._retry_at:
            self._open()
        return self._socket is not None

    def _open(self) -> None:
        try:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
            self._file = os.fstat(self._socket.fileno())
            self._socket.connect(self.path)
            _pid, uid = read_credentials(self._socket)
            distrust = find_distrust(self.path, uid)
        except (OSError, ValueError) as error:  # ValueError: a path with a null byte
            self._log_error(error)
            if isinstance(error, BlockingIOError):  # there is a daemon, with too many connections waiting
                self._delay = MIN_RETRY_SECONDS
            self._lose()
            return
        if distrust is not None:
            self._log_once(logging.WARNING, 'gpuwarden daemon not trusted, ignored uid=%d reason="%s"', uid, distrust)
            self._lose()
            return
        self._connected_at = self._clock()
        self._sent = 0
        self._owes_hello = not self._send_now(self._hello)

    def _log_error(self, error: Exception) -> None:
        """Log why the daemon cannot be reached. The kernel may have refused to follow a link of another user."""
        link = find_foreign_link(self.path) if isinstance(error, PermissionError) else None
        if link:
            self._log_once(logging.WARNING, 'gpuwarden daemon not trusted, ignored reason="%s"', link)
        else:  # at a level that training scripts do not show by default
            self._log_once(logging.INFO, 'no gpuwarden daemon, retrying while training runs error="%s"', error)

    def _log_once(self, level: int, text: str, *values: object) -> None:
        """Log why no run appears, once at each level."""
        if level not in self._logged:
            self._logged.add(level)
            log_safely(level, f'{text} socket="%s"', *values, self.path)

    def _send_now(self, message: Message) -> bool:
        assert self._socket is not None
        if not self._is_ours():
            self._lose()
            return False
        try:
            # Without MSG_NOSIGNAL, a program that has reset SIGPIPE to its default would die with the daemon.
            self._socket.send(encode(message), socket.MSG_NOSIGNAL)
        except (BlockingIOError, ProtocolError):
            self.dropped += 1
            return False
        except OSError as error:
            if error.errno == errno.EMSGSIZE:
                self.dropped += 1
                return False
            self._lose()
            return False
        self._sent += 1
        return True

    def _lose(self) -> None:
        """Drop the socket and schedule the next attempt, with a growing delay unless the connection was long-lived."""
        now = self._clock()
        self._drop()
        if self._connected_at and now - self._connected_at > MAX_RETRY_SECONDS:
            self._delay = MIN_RETRY_SECONDS
        self._connected_at = 0.0
        self._retry_at = now + self._delay
        self._delay = min(2 * self._delay, MAX_RETRY_SECONDS)

    def _drop(self) -> None:
        if self._socket is not None:
            if not self._is_ours():
                self._socket.detach()
            with contextlib.suppress(OSError):
                self._socket.close()
        self._socket = None

    def _is_ours(self) -> bool:
        """Return whether the file descriptor still belongs to this connection.

        A program may have closed all descriptors that it did not open, as daemons do, and reused the number.
        """
        assert self._socket is not None
        try:
            found = os.fstat(self._socket.fileno())
        except OSError:
            return False
        return self._file is not None and os.path.samestat(found, self._file)


_connections: weakref.WeakSet[DaemonConnection] = weakref.WeakSet()


def _close_in_child() -> None:
    # With the descriptor open in a worker process, the daemon would not notice the run's death until the worker ends.
    for connection in list(_connections):
        connection.close()


os.register_at_fork(after_in_child=_close_in_child)
