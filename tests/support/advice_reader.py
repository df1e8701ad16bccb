"""Run by the bare protocol, which writes each advice as a line of JSON: python advice_reader.py SOCKET JSON.

The JSON has `devices` (UUIDs by name), `memory` (bytes by device), `hears` and, if set, `headroom` as for the hello,
and `reads`: whether it reads advice. It starts with the first line on standard input; each later one, JSON, changes
`memory` and reports it, and `{"again": true}` reconnects.
"""

from __future__ import annotations

import json
import select
import socket
import sys
import time
from typing import Any

from gpuwarden.protocol.codec import MAX_MESSAGE_BYTES, decode_reply, encode
from gpuwarden.protocol.messages import STEP_BUCKETS, DeviceMemory, Hello, Message, Report


class Run:
    """Connections, one after another, and the messages sent over them."""

    def __init__(self, path: str, settings: dict[str, Any]) -> None:
        self._path = path
        self._settings = settings
        self.reads: bool = settings["reads"]
        self.connect()

    def connect(self) -> None:
        """Send the hello and a report."""
        self.connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.connection.connect(self._path)
        wanted = self._settings.get("headroom", False)
        self._send(Hello("hearing", "none", self._settings["devices"], hears=self._settings["hears"], headroom=wanted))
        self.report(self._settings["memory"])

    def report(self, memory: dict[str, int]) -> None:
        """Report the bytes in use."""
        self._settings["memory"] = memory
        held = {device: DeviceMemory(count, count) for device, count in memory.items()}
        self._send(Report("train", 1, 1.0, (0,) * (len(STEP_BUCKETS) + 1), held))

    def _send(self, message: Message) -> None:
        self.connection.send(encode(message))

    def receive(self) -> None:
        """Write the received advice."""
        data = self.connection.recv(MAX_MESSAGE_BYTES + 1)
        if not data:
            sys.exit("the daemon has hung up")
        advice = decode_reply(data)
        fields = {name: getattr(advice, name) for name in advice.__slots__}
        sys.stdout.write(json.dumps({**fields, "at": time.monotonic()}) + "\n")
        sys.stdout.flush()


def main() -> None:
    """Serve both ends until standard input ends."""
    sys.stdin.readline()
    run = Run(sys.argv[1], json.loads(sys.argv[2]))
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while True:
        ends = [sys.stdin, run.connection] if run.reads else [sys.stdin]
        ready = select.select(ends, [], [])[0]
        if run.connection in ready:
            run.receive()
        if sys.stdin in ready:
            line = sys.stdin.readline()
            if not line:
                return
            said = json.loads(line)
            if said.pop("again", False):
                run.connection.close()
                run.connect()
            else:
                run.report(said)


if __name__ == "__main__":
    main()
