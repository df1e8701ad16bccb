"""Connection of the training process to the daemon: it never waits, never raises, and is never needed.

Nothing here retries in a loop or runs a thread: a connection is tried when there is something to send and its turn has
come. A lost message is made good by the next, since reports carry totals.
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
from gpuwarden.protocol.codec import MAX_MESSAGE_BYTES, ProtocolError, decode_advice, encode
from gpuwarden.protocol.messages import Advice, Hello, Message

MIN_RETRY_SECONDS = 1.0  # until a connection is tried again; doubles up to MAX_RETRY_SECONDS
MAX_RETRY_SECONDS = 30.0
MAX_RECEIVED = 4  # messages that one call takes; more wait for the next


class DaemonConnection:
    """A non-blocking SOCK_SEQPACKET connection that opens with `hello` each time it is made.

    `dropped` counts messages that found the queue full or were too long. A forked child's copy is closed and stays so;
    a pickled or copied one starts unconnected.
    """

    def __init__(self, path: str, hello: Hello, clock: Callable[[], float] = time.monotonic) -> None:
        self.path = path
        self.dropped = 0
        self._hello = hello
        self._clock = clock
        self._socket: socket.socket | None = None
        self._file: os.stat_result | None = None  # which one the socket is
        self._connected_at = 0.0
        self._retry_at = -1.0
        self._delay = MIN_RETRY_SECONDS
        self._pid = os.getpid()
        self._logged = False
        self._owing = False  # the hello: a full queue did not take it, and no other message says what it does
        _connections.add(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return DaemonConnection, (self.path, self._hello)

    def set_hello(self, hello: Hello) -> None:
        """Set the hello, and send it at once where a daemon got another."""
        if hello != self._hello:
            self._hello = hello
            if self._socket is not None:
                self._owing = not self.send(hello)

    def send(self, message: Message) -> bool:
        """Send one message to the daemon; return whether it went."""
        if not self._connect():
            return False
        if self._owing and message is not self._hello:
            self._owing = not self._send_now(self._hello)
            if self._owing:
                return False
        return self._send_now(message)

    def is_connected(self) -> bool:
        """Return whether there is a connection, as far as the last message or question showed."""
        return self._socket is not None

    def receive(self) -> list[Advice]:
        """Return the advice that has come, of up to MAX_RECEIVED messages.

        Never waits. A message that is no advice is left out; it comes from a newer daemon, or a broken one.
        """
        advice: list[Advice] = []
        for _ in range(MAX_RECEIVED):
            if self._socket is None or self._pid != os.getpid():
                break
            try:
                data = self._socket.recv(MAX_MESSAGE_BYTES + 1, socket.MSG_DONTWAIT) if self._is_ours() else b""
            except BlockingIOError:  # nothing waits
                break
            except OSError:
                data = b""
            if not data:  # the daemon is gone
                self._lose()
                break
            with contextlib.suppress(ProtocolError):
                advice.append(decode_advice(data))
        return advice

    def wait_for_room(self, seconds: float) -> None:
        """Wait until a full queue takes messages again, at most `seconds`; not at all without a daemon."""
        if self._socket is not None and self._pid == os.getpid():
            room = select.poll()
            room.register(self._socket, select.POLLOUT)
            room.poll(seconds * 1000)

    def close(self) -> None:
        """Close, and never connect again."""
        self._drop()
        self._retry_at = float("inf")

    def _connect(self) -> bool:
        if self._pid != os.getpid():
            return False  # a forked child reports as a run of its own or not at all
        if self._socket is None and self._clock() >= self._retry_at:
            self._open()
        return self._socket is not None

    def _open(self) -> None:
        try:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
            self._file = os.fstat(self._socket.fileno())
            self._socket.connect(self.path)
        except (OSError, ValueError) as error:  # ValueError: a path with a null byte
            self._log_once(error)
            if isinstance(error, BlockingIOError):  # there is a daemon, and too many others come at this moment
                self._delay = MIN_RETRY_SECONDS
            self._lose()
            return
        self._connected_at = self._clock()
        self._owing = not self._send_now(self._hello)

    def _log_once(self, error: Exception) -> None:
        """Log why no run appears, at a level that training scripts do not show by default."""
        if not self._logged:
            self._logged = True
            text = "no gpuwarden daemon at %s (%s): nothing is reported until there is one"
            log_safely(logging.INFO, text, self.path, error)

    def _send_now(self, message: Message) -> bool:
        assert self._socket is not None
        if not self._is_ours():
            self._lose()
            return False
        try:
            # Without MSG_NOSIGNAL a program that gave SIGPIPE its default action would die with the daemon.
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
        return True

    def _lose(self) -> None:
        """Drop the socket and set when to try again: later each time, unless the connection had lasted."""
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
        """Return whether the number is still the connection's.

        A program may close all it does not know of, as daemons do, and have another file there by now.
        """
        assert self._socket is not None
        try:
            found = os.fstat(self._socket.fileno())
        except OSError:
            return False
        return self._file is not None and os.path.samestat(found, self._file)


_connections: weakref.WeakSet[DaemonConnection] = weakref.WeakSet()


def _close_in_child() -> None:
    # A worker process that kept the descriptor would hide the run's death from the daemon for as long as it lives.
    for connection in list(_connections):
        connection.close()


os.register_at_fork(after_in_child=_close_in_child)
