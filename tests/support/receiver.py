"""The daemon's end of the socket, for tests of the training process's end."""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path

from gpuwarden.protocol.codec import MAX_MESSAGE_BYTES, decode, encode
from gpuwarden.protocol.messages import Message, Reply

MAX_WAIT_SECONDS = 30  # seconds until a test that waits for a message fails


class Receiver:
    """A listening SOCK_SEQPACKET socket; `accept` returns the connections of runs, oldest first."""

    def __init__(self, path: Path, backlog: int = 8, patience: float = MAX_WAIT_SECONDS) -> None:
        self.path = str(path)
        self._patience = patience
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(self.path)
        self._listener.listen(backlog)
        self._listener.settimeout(self._patience)
        self._peers: list[Peer] = []

    def accept(self) -> Peer:
        """Wait for the next connection."""
        peer = Peer(self._listener.accept()[0])
        self._peers.append(peer)
        return peer

    def connected(self) -> bool:
        """Return whether a connection waits to be accepted."""
        self._listener.settimeout(0)
        try:
            self.accept()
        except BlockingIOError:
            return False
        finally:
            self._listener.settimeout(self._patience)
        return True

    def kill(self) -> None:
        """End as a killed daemon does: every connection breaks and the socket's file stays."""
        for each in [self._listener, *(peer.socket for peer in self._peers)]:
            each.close()

    def close(self) -> None:
        """End and leave nothing behind."""
        self.kill()
        os.unlink(self.path)  # noqa: PTH108 - the path may have been given up as text


class Peer:
    """One run's connection."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.socket.settimeout(MAX_WAIT_SECONDS)

    def receive(self) -> Message | None:
        """Wait for a message; None at the end of the connection."""
        data = self.socket.recv(MAX_MESSAGE_BYTES + 1)
        return decode(data) if data else None

    def waiting(self) -> list[Message]:
        """Return the waiting messages, without blocking."""
        self.socket.settimeout(0)
        messages: list[Message] = []
        try:
            while (message := self.receive()) is not None:
                messages.append(message)
        except BlockingIOError:
            pass
        finally:
            self.socket.settimeout(MAX_WAIT_SECONDS)
        return messages

    def advise(self, *replies: Reply) -> None:
        """Send advice or summaries to the run."""
        for each in replies:
            self.socket.send(encode(each))

    def pid(self) -> int:
        """Return the pid of the process that connected, from the kernel."""
        credentials = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        return int(struct.unpack("3i", credentials)[0])
